"""Convert rows in any supported format to examples.

| format              | keys (optional ones in brackets)                                                    |
|---------------------|-------------------------------------------------------------------------------------|
| preference          | chosen, rejected [prompt or messages, input, history]: strings, or lists of messages |
| comparison          | answer_a, answer_b, better [prompt, input]: two answers, and which one is better    |
| unpaired_preference | label, and the keys of any format below but text                                    |
| messages            | messages: [{role, content}, …]                                                      |
| sharegpt            | conversations: [{from, value}, …]                                                   |
| prompt_completion   | prompt, completion [context, history, reasoning]: two strings or lists of messages  |
| alpaca              | instruction, output (or response) [input (or context), history, reasoning]          |
| text                | text                                                                                |
| prompt              | prompt [context, history]: a string or a list of messages, for an answer to be drawn, |
|                     | and no column with the name of an answer                                             |

All but text may have system (or system_prompt, system_message), and tools or OpenAI's older functions.

Null counts as absent everywhere, a blank string only for an optional key. A string in place of a list or an object is
parsed as JSON. An answer or a text must not be blank; a prompt may be.

`history` is a list of [question, answer] or of messages, before the question; `context` is text before it. `reasoning`
is that of the answer, and may have any name that says so (`row_values.py`). `data.columns` names a column for a key, or
null, which leaves it out. Other columns that seem to hold a part of the conversation are named (`row_values.py`).

A format of strings gives a conversation, for models with a chat template, and a plain form: `prompt` and `completion`,
with `system` and a blank line before the prompt; the plain form cannot include tools. If the messages come in two
parts, only the second part is trained on.

A preference is a pair of examples (`answers`). What both conversations begin with is not trained on; from the first
message that differs, every assistant message is. An unpaired preference is one example with a label, which judges what
follows the last question. A comparison is a preference once its verdict is read; `comparisons.py` has the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from dualtune.base.errors import DataError
from dualtune.config.data_section import Consecutive
from dualtune.data.chat.comparisons import ANSWERS, LAYOUTS, A, B, Layout, comparison, preference
from dualtune.data.chat.conversations import (
    RowReading,
    read_history,
    read_messages,
    text_of,
    texts_of,
    with_reasoning,
)
from dualtune.data.chat.examples import (
    Example,
    answer_in,
    answers,
    are_strings,
    chat_example,
    is_string,
    not_trained_on,
    pair_example,
    trained_from,
    with_conversations,
)
from dualtune.data.chat.row_values import (
    BLANK,
    KEYS_OF_REASONING,
    REASONING,
    SYSTEM_NAMES,
    UNREAD_LABEL,
    Columns,
    check_columns,
    column_of,
    has_likely_answer,
    has_value,
    holds_calls,
    in_yaml,
    left_out,
    listed,
    shown,
    suggested_columns,
    unread,
)
from dualtune.data.sources.rows import BadRow, RawRow, RowError, Tie, TieError

# The prompts of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), for models without a chat template.
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT_PROMPT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
# What the label of an unpaired preference may be, in lower case: 1 for a desirable answer, -1 for an undesirable one.
LABELS = {
    **dict.fromkeys(("true", "1", "yes", "desirable", "chosen", "accepted", "good", "positive"), 1),
    **dict.fromkeys(("false", "0", "-1", "no", "undesirable", "rejected", "bad", "negative"), -1),
}
LABEL_NAMES = ("label", "kto_tag")


@dataclass(frozen=True, slots=True)
class Format:
    """A format of rows: how it is recognized, and converted to examples."""

    convert: Callable[[RawRow, Mapping[str, Any], RowReading], Example]
    keys: tuple[str, ...]  # every row has them
    optional: tuple[str, ...] = ()
    # Other names of a key, used where a row has none of its own name.
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SYSTEM_NAMES)
    layouts: tuple[Format, ...] = ()  # a row is read as the first of these that has its keys
    can_lack: tuple[str, ...] = ()  # those of `keys` that data.columns may leave out
    is_told: Callable[[Mapping[str, Any]], bool] = lambda fields: True  # see `is_detected`
    only_by_name: bool = False  # not detected by its keys alone

    @property
    def all_keys(self) -> tuple[str, ...]:
        return self.keys + self.optional

    def column(self, key: str, fields: Mapping[str, Any], columns: Columns) -> str:
        return column_of(key, self.all_keys, self.aliases, fields, columns)

    def needed(self, columns: Columns) -> list[str]:
        """Return the keys that every row has."""
        return [key for key in self.keys if not (key in self.can_lack and key in left_out(columns))]

    def has_keys(self, fields: Mapping[str, Any], columns: Columns) -> bool:
        """Return whether a row has what this format needs."""
        needed, without = self.needed(columns), left_out(columns)
        if any(key in without or fields.get(self.column(key, fields, columns)) is None for key in needed):
            return False
        return not self.layouts or self.layout(fields, columns) is not self

    def is_detected(self, fields: Mapping[str, Any], columns: Columns) -> bool:
        """Return whether a row has this format's keys, and values that tell it, unless data.columns names a key."""
        if self.only_by_name or not self.has_keys(fields, columns):
            return False
        values = {key: fields[self.column(key, fields, columns)] for key in self.needed(columns)}
        return any(columns.get(key) for key in self.keys) or self.is_told(values)

    def layout(self, fields: Mapping[str, Any], columns: Columns) -> Format:
        return next((layout for layout in self.layouts if layout.has_keys(fields, columns)), self)


def to_examples(
    rows: Iterable[RawRow | BadRow],
    format: str,
    columns: Columns,
    roles: Mapping[str, str] = MappingProxyType({}),
    consecutive: Consecutive = "join",
) -> Iterator[Example | BadRow]:
    """Convert rows of a named format, or of the format detected from the first good row ("auto").

    `columns` maps our key to the file's, such as {"prompt": "question", "completion": "answer"}; null leaves it out.
    `roles` maps further names of roles to ours, `consecutive` says what becomes of two turns of one role in a row.
    Raises DataError for faults of all rows: `columns` that do not fit the format, a first row in no known format.
    """
    name = "" if format == "auto" else format
    if name:
        _check_columns(columns, name)
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        name = name or detect_format(row, columns)
        yield _convert(row, name, columns, RowReading(roles, consecutive, columns))


def detect_format(row: RawRow, columns: Columns) -> str:
    """Return the first format with all keys in the row, after the column mapping. Raises DataError if none fits."""
    _check_columns(columns)
    names, named = _formats_of(row, columns), columns.keys() - left_out(columns)
    for name in names:
        if named <= set(FORMATS[name].all_keys):
            return name
    if names:
        _check_columns(columns, names[0])
    has_prompt = FORMATS["prompt"].has_keys(row.fields, columns)
    if has_prompt and not has_likely_answer(row.fields) and named <= set(FORMATS["prompt"].all_keys):
        return "prompt"
    if not names and (lacking := _formats_of_lacking(row, columns)):
        return lacking[0]
    formats = "; ".join(f"{name} ({', '.join(format.keys)})" for name, format in FORMATS.items())
    likely = ", ".join(f"{key}: {in_yaml(column)}" for key, column in suggested_columns(row.fields).items())
    raise DataError(
        f"{row.where}: no known format has the keys {listed(row.fields)}. Known: {formats}. Map other names with "
        + (f"data.columns, here likely {{{likely}}}." if likely else _UNTOLD)
        + (" data.format: prompt reads the prompt alone." if has_prompt else "")
        + "".join(_CALLS.format(repr(name)) for name in row.fields if holds_calls(row.fields[name]))
    )


_UNTOLD = (
    "data.columns, for example columns: {prompt: question, completion: answer}; what is a list or an object must first "
    "be written as a text of its own."
)
_CALLS = (
    " {} holds calls of tools: write each row as messages, the question as {{role: user, content: …}} and the calls as "
    "{{role: tool_call, content: …}}, beside its tools."
)


def _formats_of(row: RawRow, columns: Columns) -> list[str]:
    return [name for name, format in FORMATS.items() if format.is_detected(row.fields, columns)]


def _formats_of_lacking(row: RawRow, columns: Columns) -> list[str]:
    """Return the formats of which a row has all keys and some values: it is a bad row of one of them."""
    filled = {key: "" if value is None else value for key, value in row.fields.items()}

    def has_value_of(format: Format) -> bool:
        return any(row.fields.get(format.column(key, row.fields, columns)) is not None for key in format.keys)

    return [name for name in _formats_of(replace(row, fields=filled), columns) if has_value_of(FORMATS[name])]


def _check_columns(columns: Columns, name: str | None = None) -> None:
    every = [key for format in FORMATS.values() for key in format.all_keys]
    if name is None:
        check_columns(columns, every, "the formats have", every)
    else:
        check_columns(columns, every, f"the format {name} has", FORMATS[name].all_keys, FORMATS[name].needed(columns))


def _convert(row: RawRow, name: str, columns: Columns, reading: RowReading) -> Example | BadRow:
    format, without = FORMATS[name].layout(row.fields, columns), left_out(columns)
    try:
        places = {key: format.column(key, row.fields, columns) for key in format.all_keys}
        needed = format.needed(columns)
        for key in needed:
            if row.fields.get(places[key]) is None:
                raise RowError(_lacks(row, name, places[key]))
        fields = {
            key: row.fields[place]
            for key, place in places.items()
            if key in needed or (key not in without and has_value(row.fields, place))
        }
        example = format.convert(row, fields, reading)
        messages = [message for answer in answers(example) for message in answer.messages]
        texts = [message.content for message in messages] or [example.completion or ""]
        thoughts = [str(message.extra.get(key, "")) for message in messages for key in KEYS_OF_REASONING]
        read = {place for key, place in places.items() if key != REASONING or key in columns} | without
        kinds = reading.notices | unread(row.fields, read, texts, thoughts, is_plain=example.is_text)
        if any(message.role == "user" and not message.content.strip() for message in messages):
            kinds.add(BLANK)
        if name in _PLAIN and (label := _unread_label(row.fields, read)):
            kinds.add(f"{UNREAD_LABEL}: {label}")
        return replace(example, notices=frozenset(kinds)) if kinds else example
    except RowError as reason:
        kind = Tie if isinstance(reason, TieError) else BadRow
        return kind(row.path, row.line, str(reason))
    except RecursionError:
        return BadRow(row.path, row.line, "is nested too deeply")


def _unread_label(fields: Mapping[str, Any], read: Collection[str]) -> str:
    """Return the column that could be the label of an unpaired preference and is not in `read`; "" if there is none."""
    names = [name for name in LABEL_NAMES if name not in read and name in fields]
    return next((name for name in names if _as_label(fields[name]) is not None), "")


def _lacks(row: RawRow, name: str, key: str) -> str:
    if key in row.fields:
        return f"{key}: is null"
    reason = f"has no '{key}'; its keys are: {listed(row.fields)}"
    if likely := suggested_columns(row.fields).get(key):
        reason += f"; if '{likely}' is meant, set data.columns: {{{key}: {in_yaml(likely)}}}"
    others = _formats_of(row, {})
    if not others or name in others:
        return reason
    return f"{reason}; this row looks like {others[0]}, but the file is read as {name}: all rows need the same format"


# --- one row of each format ------------------------------------------------------------------------------------------


def _messages(row: RawRow, fields: Mapping[str, Any], reading: RowReading, key: str = "messages") -> Example:
    return chat_example(row, fields, read_messages(fields[key], key, reading), reading)


def _prompt_completion(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    fields = with_conversations(fields, ("prompt", "completion"), reading)
    if are_strings(fields, "prompt", "completion"):
        prompt = text_of(fields["prompt"], "prompt", reading)
        if "context" in fields:
            prompt = "\n\n".join([*texts_of(fields["context"], "context", reading), prompt])
        return pair_example(row, fields, prompt, prompt, "completion", reading)
    if "context" in fields:
        raise RowError("context: is read only beside a prompt that is a text; put it into a message of the prompt")
    before = read_messages(fields["prompt"], "prompt", reading, "prompt: message")
    answer = read_messages(fields["completion"], "completion", reading, "completion: message")
    if all(message.role != "assistant" for message in answer):
        raise RowError("completion: has no assistant message, so there is nothing to train on")
    if REASONING in fields:
        answer = with_reasoning(answer, fields[REASONING], reading)
    messages = not_trained_on(before) + answer
    if "history" in fields:
        messages = read_history(fields["history"], reading) + messages
    return chat_example(row, fields, messages, reading, "prompt and completion: message")


def _prompt_alone(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    if is_string(fields["prompt"]):
        answered = _prompt_completion(row, {**fields, "completion": "?"}, reading)
    else:
        answer = [{"role": "assistant", "content": "?"}]
        if read_messages(fields["prompt"], "prompt", reading, "prompt: message")[-1].role == "assistant":
            raise RowError("prompt: ends with an assistant message, so nothing is asked; set data.format: messages")
        answered = _prompt_completion(row, {**fields, "completion": answer}, reading)
    return replace(answered, messages=not_trained_on(answered.messages[:-1]), completion="", is_prompt=True)


def _alpaca(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    instruction = text_of(fields["instruction"], "instruction", reading)
    context = "\n\n".join(texts_of(fields.get("input", ""), "input", reading))
    plain = (ALPACA_INPUT_PROMPT if context else ALPACA_PROMPT).format(instruction=instruction, input=context)
    return pair_example(
        row, fields, f"{instruction}\n\n{context}" if context else instruction, plain, "output", reading
    )


def _text(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    return Example(row.path, row.line, prompt="", completion=answer_in(fields, "text", reading), is_text=True)


def _compares(layout: Layout) -> Format:
    """Return the format of rows with two answers and a verdict."""
    optional = tuple(key for key in _COMPARED if key not in layout.keys)
    return Format(comparison(layout), layout.keys, optional, {**SYSTEM_NAMES, **layout.aliases})


def _without_verdict(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    raise RowError(f"needs a prompt, two answers and a verdict in known columns; its keys are: {listed(row.fields)}")


def _judged(layout: Format) -> Format:
    """Return the format of rows with a label beside the keys of another format."""

    def convert(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
        example = layout.convert(row, fields, reading)
        if (label := _as_label(fields["label"])) is None:
            raise RowError(f"label: got {shown(fields['label'])}, allowed: {', '.join(LABELS)}")
        question = max((i for i, message in enumerate(example.messages) if message.role == "user"), default=0)
        return replace(trained_from(question, example), label=label)

    aliases = {**layout.aliases, "label": LABEL_NAMES[1:]} | ({"prompt": _QUESTIONS} if "prompt" in layout.keys else {})
    return Format(convert, (*layout.keys, "label"), layout.optional, aliases)


def _as_label(value: Any) -> int | None:
    return LABELS.get(str(value).strip().lower().removesuffix(".0"))


def _without_layout(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    needed = " or ".join(" and ".join(f"'{key}'" for key in layout.keys[:-1]) for layout in _JUDGED)
    raise RowError(f"has a label, and needs beside it {needed}; its keys are: {listed(row.fields)}")


def _is_boolean(fields: Mapping[str, Any]) -> bool:
    """Return whether the label can be nothing but a judgement: numbers and words may be classes."""
    return isinstance(fields["label"], bool)


_COMMON = ("system", "tools", "functions")
_QUESTIONS = ("question", "instruction")  # other names of the prompt where answers are judged
_PLAIN = {
    "messages": Format(_messages, ("messages",), _COMMON),
    "sharegpt": Format(partial(_messages, key="conversations"), ("conversations",), _COMMON),
    "prompt_completion": Format(
        _prompt_completion, ("prompt", "completion"), (*_COMMON, "context", "history", REASONING)
    ),
    "alpaca": Format(
        _alpaca, ("instruction", "output"), ("input", *_COMMON, "history", REASONING),
        {**SYSTEM_NAMES, "output": ("response",), "input": ("context",)},
    ),
}  # fmt: skip
_JUDGED = tuple(_judged(format) for format in _PLAIN.values())
_COMPARED = ("prompt", A, B, "better", "input", "score_a", "score_b", *_COMMON)
# In order of detection: the most specific keys first.
FORMATS = {
    "preference": Format(
        preference, ANSWERS,
        ("prompt", "messages", "input", *_COMMON, "history", "score_chosen", "score_rejected"),
        {
            **SYSTEM_NAMES,
            "chosen": ("chosen_response", "response_chosen", "answer_chosen", "preferred_output"),
            "rejected": ("rejected_response", "response_rejected", "answer_rejected", "non_preferred_output"),
            "prompt": _QUESTIONS, "messages": ("conversations",),
            "score_chosen": ("chosen_score", "chosen-rating", "chosen_rating", "chosen_avg_rating"),
            "score_rejected": ("rejected_score", "rejected-rating", "rejected_rating", "rejected_avg_rating"),
        },
        can_lack=("rejected",),
    ),
    "comparison": Format(
        _without_verdict, (A, B, "better"), tuple(key for key in _COMPARED if key not in (A, B, "better")),
        {key: tuple(name for layout in LAYOUTS for name in layout.aliases.get(key, ())) for key in _COMPARED},
        tuple(map(_compares, LAYOUTS)),
    ),
    "unpaired_preference": Format(
        _without_layout, ("label",), tuple(dict.fromkeys(key for f in _JUDGED for key in f.all_keys if key != "label")),
        {key: names for f in _JUDGED for key, names in f.aliases.items()}, _JUDGED, is_told=_is_boolean,
    ),
    **_PLAIN,
    "text": Format(_text, ("text",)),
    # Other rows have a prompt too, and an answer in a column of another name: see `detect_format`.
    "prompt": Format(_prompt_alone, ("prompt",), (*_COMMON, "context", "history"), only_by_name=True),
}  # fmt: skip
