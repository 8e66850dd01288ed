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

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from dualtune.base.errors import DataError
from dualtune.config.data_section import Consecutive
from dualtune.data.chat.comparisons import LAYOUTS, TIE, A, B, Layout
from dualtune.data.chat.conversations import (
    Message,
    RowReading,
    arranged,
    asked_nulls,
    messages_in_text,
    read_history,
    read_messages,
    read_tools,
    text_of,
    texts_of,
    with_reasoning,
)
from dualtune.data.chat.row_values import (
    EQUAL_SCORES,
    KEYS_OF_REASONING,
    PARSED,
    REASONING,
    REVERSED_SCORES,
    SYSTEM_NAMES,
    UNREAD_LABEL,
    Columns,
    as_object,
    check_columns,
    column_of,
    has_likely_answer,
    has_value,
    is_scalar,
    left_out,
    listed,
    needed,
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
EQUAL_PAIR = "'chosen' and 'rejected' are the same"  # why such a row is bad
# The same of a pair whose difference is not in the text, such as a space at the end that the template cuts off.
EQUAL_TEXTS = "'chosen' and 'rejected' are the same text: the chat template does not write what differs"
# What the label of an unpaired preference may be, in lower case: 1 for a desirable answer, -1 for an undesirable one.
LABELS = {
    **dict.fromkeys(("true", "1", "yes", "desirable", "chosen", "accepted", "good", "positive"), 1),
    **dict.fromkeys(("false", "0", "-1", "no", "undesirable", "rejected", "bad", "negative"), -1),
}
LABEL_NAMES = ("label", "kto_tag")
ANSWERS = ("chosen", "rejected")
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # of a conversation as one text, as in HH-RLHF


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation, a prompt and completion, or both: whether the model has a chat template decides which is used."""

    path: str
    line: int
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of functions, for the template
    prompt: str | None = None  # plain form: what the model sees…
    completion: str | None = None  # …and what it generates
    rejected: Example | None = None  # the same question with the worse answer
    label: int = 0  # of an unpaired preference: 1 desirable, -1 undesirable; 0 otherwise
    is_text: bool = False  # plain text: no turns, every token is a target, split if too long
    is_prompt: bool = False  # without an answer
    notices: frozenset[str] = field(default=frozenset(), compare=False)  # kinds of `row_values.py`

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


def answers(example: Example) -> tuple[Example, ...]:
    """Return what is trained on in a row: the chosen and the rejected example of a pair, else the example itself."""
    return (example,) if example.rejected is None else (replace(example, rejected=None), example.rejected)


def judged(example: Example) -> tuple[Example, ...]:
    """Return a pair as a desirable and an undesirable example; any other as it is."""
    if example.rejected is None:
        return (example,)
    chosen, rejected = answers(example)
    return replace(chosen, label=1), replace(rejected, label=-1)


def num_shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many messages two conversations begin with that say the same; their loss weights may differ."""
    contents = ([(m.role, m.content, m.extra) for m in messages] for messages in (chosen, rejected))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*contents, strict=False)))


@dataclass(frozen=True, slots=True)
class Format:
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
    formats = "; ".join(f"{name} ({', '.join(format.keys)})" for name, format in FORMATS.items())
    likely = ", ".join(f"{key}: {column}" for key, column in suggested_columns(row.fields).items())
    raise DataError(
        f"{row.where}: no known format has the keys {listed(row.fields)}. Known: {formats}. Map other names with "
        + (f"data.columns, here likely {{{likely}}}." if likely else _UNTOLD)
        + (" data.format: prompt reads the prompt alone." if has_prompt else "")
    )


_UNTOLD = (
    "data.columns, for example columns: {prompt: question, completion: answer}; what is a list or an object must first "
    "be written as a text of its own."
)


def _formats_of(row: RawRow, columns: Columns) -> list[str]:
    return [name for name, format in FORMATS.items() if format.is_detected(row.fields, columns)]


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
    reason = f"has no '{key}'; its keys are: {listed(row.fields)}"
    if likely := suggested_columns(row.fields).get(key):
        reason += f"; if '{likely}' is meant, set data.columns: {{{key}: {likely}}}"
    others = _formats_of(row, {})
    if not others or name in others:
        return reason
    return f"{reason}; this row looks like {others[0]}, but the file is read as {name}: all rows need the same format"


# --- one row of each format ------------------------------------------------------------------------------------------


def _messages(row: RawRow, fields: Mapping[str, Any], reading: RowReading, key: str = "messages") -> Example:
    return _chat(row, fields, read_messages(fields[key], key, reading), reading)


def _prompt_completion(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    fields = _with_conversations(fields, ("prompt", "completion"), reading)
    if _are_strings(fields, "prompt", "completion"):
        prompt = text_of(fields["prompt"], "prompt", reading)
        if "context" in fields:
            prompt = "\n\n".join([*texts_of(fields["context"], "context", reading), prompt])
        return _pair(row, fields, prompt, prompt, "completion", reading)
    if "context" in fields:
        raise RowError("context: is read only beside a prompt that is a text; put it into a message of the prompt")
    before = read_messages(fields["prompt"], "prompt", reading, "prompt: message")
    answer = read_messages(fields["completion"], "completion", reading, "completion: message")
    if all(message.role != "assistant" for message in answer):
        raise RowError("completion: has no assistant message, so there is nothing to train on")
    if REASONING in fields:
        answer = with_reasoning(answer, fields[REASONING], reading)
    messages = _not_trained_on(before) + answer
    if "history" in fields:
        messages = read_history(fields["history"], reading) + messages
    return _chat(row, fields, messages, reading, "prompt and completion: message")


def _prompt_alone(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    if _is_string(fields["prompt"]):
        answered = _prompt_completion(row, {**fields, "completion": "?"}, reading)
    else:
        answer = [{"role": "assistant", "content": "?"}]
        if read_messages(fields["prompt"], "prompt", reading, "prompt: message")[-1].role == "assistant":
            raise RowError("prompt: ends with an assistant message, so nothing is asked; set data.format: messages")
        answered = _prompt_completion(row, {**fields, "completion": answer}, reading)
    return replace(answered, messages=_not_trained_on(answered.messages[:-1]), completion="", is_prompt=True)


def _alpaca(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    instruction = text_of(fields["instruction"], "instruction", reading)
    context = "\n\n".join(texts_of(fields.get("input", ""), "input", reading))
    plain = (ALPACA_INPUT_PROMPT if context else ALPACA_PROMPT).format(instruction=instruction, input=context)
    return _pair(row, fields, f"{instruction}\n\n{context}" if context else instruction, plain, "output", reading)


def _text(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    return Example(row.path, row.line, prompt="", completion=_answer(fields, "text", reading), is_text=True)


def _preference(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    fields = _with_conversations(_without_request(fields), [key for key in ANSWERS if key in fields], reading)
    fields = _with_conversations(fields, ("prompt",), reading)
    if texts := _transcripts(fields):
        others = {key: value for key, value in fields.items() if key != "prompt"}
        spoken = {key: _spoken(text) for key, text in texts.items()}
        examples = _with_texts(_compared(row, {**others, **spoken}, reading), texts, fields)
    else:
        examples = _compared(row, fields, reading)
    if len(examples) == 1:  # data.columns leaves out 'rejected'
        return examples[0]
    chosen, rejected = examples
    if chosen == rejected:
        raise RowError(EQUAL_PAIR)
    _compare_scores(fields, reading)
    return replace(chosen, rejected=rejected)


def _without_request(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with the question in place of an `input` that holds it as a request, as OpenAI's rows do."""
    if not isinstance(fields.get("input"), dict):
        return fields
    if others := [key for key in ("prompt", "messages") if key in fields]:
        raise RowError(f"input: holds the messages of a prompt, and '{others[0]}' does too; keep one of them")
    request = as_object(fields["input"], "input")
    columns = {"prompt": needed(request, "messages", "input"), "tools": request.get("tools")}
    others = {key: value for key, value in fields.items() if key != "input"}
    return others | {key: value for key, value in columns.items() if value}


def _with_conversations(fields: Mapping[str, Any], keys: Sequence[str], reading: RowReading) -> Mapping[str, Any]:
    """Return the fields with lists of messages in place of texts that are such a list as JSON, as tables hold it.

    Either the values of all keys are such lists or none is read so: one alone may be a text about conversations.
    """
    lists = {key: messages_in_text(fields[key], key) for key in keys if isinstance(fields.get(key), str)}
    if not lists or not all(lists.values()) or any(_is_string(fields.get(key)) for key in keys if key not in lists):
        return fields
    reading.notices.add(PARSED)
    return {**fields, **lists}


def _compares(layout: Layout) -> Format:
    """Return the format of rows with two answers and a verdict."""

    def convert(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
        better = layout.verdict(fields["better"])
        if better == TIE:
            raise TieError("neither answer is better")
        pair = [("chosen", better), ("rejected", B if better == A else A)]
        scores = {A: "score_a", B: "score_b"}
        named = {key: value for key, value in fields.items() if key not in (A, B, "better", *scores.values())}
        for key, answer in pair[:1] if "rejected" in reading.columns else pair:  # left out, for sft
            named[key] = fields[answer]
            if scores[answer] in fields:
                named[f"score_{key}"] = fields[scores[answer]]
        return _preference(row, named, reading)

    optional = tuple(key for key in _COMPARED if key not in layout.keys)
    return Format(convert, layout.keys, optional, {**SYSTEM_NAMES, **layout.aliases})


def _without_verdict(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    raise RowError(f"needs a prompt, two answers and a verdict in known columns; its keys are: {listed(row.fields)}")


def _compared(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> list[Example]:
    """Return an example of each answer. Of a pair, what both begin with is not trained on."""
    keys = [key for key in ANSWERS if key in fields]
    if _are_strings(fields, *keys) and "messages" not in fields and not isinstance(fields.get("prompt"), list | dict):
        if "prompt" not in fields and "input" not in fields:
            raise RowError("has no 'prompt', which is needed if 'chosen' and 'rejected' are strings")
        prompt = _question(fields, reading)
        examples = [_pair(row, fields, prompt, prompt, key, reading) for key in keys]
        return [_trained_from(len(example.messages) - 1, example) for example in examples]
    whole = {key: _whole(fields, key, reading) for key in keys}
    key, prompt = _prompt_messages(fields, reading)
    if key == "messages" and prompt[-1].role == "assistant" and prompt[-1] not in [m[-1] for m in whole.values()]:
        raise RowError("messages: ends with an answer that is neither that of 'chosen' nor of 'rejected'; remove one")
    shared = _num_both_begin_with(*whole.values()) if len(whole) == 2 else 0
    return [
        _chat(
            row,
            fields,
            _not_trained_on(messages[:shared]) + messages[shared:],
            reading,
            f"{key} with its prompt: message",
        )
        for key, messages in whole.items()
    ]


def _num_both_begin_with(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    shared = num_shared(chosen, rejected)
    if shared == len(chosen) == len(rejected):
        raise RowError(EQUAL_PAIR)
    if shared in (len(chosen), len(rejected)):
        short, long = ANSWERS if shared == len(chosen) else ANSWERS[::-1]
        raise RowError(f"{long}: continues after the whole of '{short}', so there is nothing to compare it with")
    roles = {message.role for message in chosen[:shared]}
    if "user" not in roles and "user" in (chosen[shared].role, rejected[shared].role):
        raise RowError("'chosen' and 'rejected' must answer the same question: they begin with different ones")
    return shared


def _whole(fields: Mapping[str, Any], key: str, reading: RowReading) -> tuple[Message, ...]:
    """Return the whole conversation. The value holds only what follows the prompt, or the messages before it too."""
    if _is_string(fields[key]):
        messages = (Message("assistant", _answer(fields, key, reading)),)
    else:
        messages = read_messages(fields[key], key, reading, f"{key}: message")
    if messages[-1].role != "assistant":
        raise RowError(f"{key}: must end with an assistant message, got a {messages[-1].role} message")
    prompt_key, prompt = _prompt_messages(fields, reading)
    if prompt_key == "messages" and prompt[-1].role == "assistant":  # one of the two conversations, once more
        prompt = prompt[:-1]
    contents = {(message.role, message.content.strip()) for message in messages}
    if messages[0].role in ("assistant", "tool"):
        messages = prompt + messages
    elif any((message.role, message.content.strip()) not in contents for message in prompt):
        raise RowError(f"{key}: is a whole conversation, but does not contain the messages of '{prompt_key}'")
    if "history" in fields:
        messages = read_history(fields["history"], reading) + messages
    return messages


def _prompt_messages(fields: Mapping[str, Any], reading: RowReading) -> tuple[str, tuple[Message, ...]]:
    """Return the key that holds the prompt of a preference, and its messages."""
    prompt: tuple[Message, ...] = ()
    if _is_string(fields.get("prompt", "")) and ("prompt" in fields or "input" in fields):
        prompt = (Message("user", _question(fields, reading)),)
    elif "prompt" in fields:
        prompt = read_messages(fields["prompt"], "prompt", reading, "prompt: message")
    if "messages" not in fields:
        return "prompt", prompt
    messages = read_messages(fields["messages"], "messages", reading, "messages: message")
    if any(message not in messages for message in prompt):
        raise RowError("messages: does not contain the messages of 'prompt'; keep one of them")
    return "messages", messages


def _question(fields: Mapping[str, Any], reading: RowReading) -> str:
    """Return the prompt, with what it is about after it."""
    return "\n\n".join(text_of(fields[key], key, reading) for key in ("prompt", "input") if key in fields)


def _transcripts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the conversations if each is one text, whose beginning may be in `prompt`."""
    prompt, told = fields.get("prompt", ""), {key: fields[key] for key in ANSWERS if key in fields}
    if "messages" in fields or "input" in fields or not all(isinstance(text, str) for text in (prompt, *told.values())):
        return {}
    texts = {key: f"{prompt}{text}" for key, text in told.items()}
    return texts if all(_SPEAKER.match(text) for text in texts.values()) else {}


def _with_texts(examples: list[Example], texts: Mapping[str, str], fields: Mapping[str, Any]) -> list[Example]:
    """Return the examples with the texts as their plain form, if these differ in nothing but the last answer."""
    prompts = {text[: [*_SPEAKER.finditer(text)][-1].end()] for text in texts.values()}
    if len(prompts) > 1 or "system" in fields or "history" in fields:
        return examples
    (prompt,) = prompts
    return [
        replace(example, prompt=prompt, completion=text.removeprefix(prompt))
        for example, text in zip(examples, texts.values(), strict=True)
    ]


def _spoken(text: str) -> list[dict[str, str]]:
    """Return the messages of a conversation that is one text: "Human: … Assistant: …"."""
    marks = list(_SPEAKER.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [{"role": mark[1], "content": text[mark.end() : end].strip()} for mark, end in zip(marks, ends, strict=True)]


def _compare_scores(fields: Mapping[str, Any], reading: RowReading) -> None:
    """Tell if the scores of the two answers, where a row has them, do not say that the chosen one is better."""
    scores = [_score(fields[key], key) for key in ("score_chosen", "score_rejected") if key in fields]
    if len(scores) == 2 and scores[0] <= scores[1]:
        reading.notices.add(EQUAL_SCORES if scores[0] == scores[1] else REVERSED_SCORES)


def _score(value: Any, key: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RowError(
            f"{key}: got {shown(value)}, a number is needed; data.columns: {{{key}: null}} leaves it out"
        ) from error


def _judged(layout: Format) -> Format:
    """Return the format of rows with a label beside the keys of another format."""

    def convert(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
        example = layout.convert(row, fields, reading)
        if (label := _as_label(fields["label"])) is None:
            raise RowError(f"label: got {shown(fields['label'])}, allowed: {', '.join(LABELS)}")
        question = max((i for i, message in enumerate(example.messages) if message.role == "user"), default=0)
        return replace(_trained_from(question, example), label=label)

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
        _preference, ANSWERS,
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


# --- parts -----------------------------------------------------------------------------------------------------------


def _chat(
    row: RawRow, fields: Mapping[str, Any], messages: tuple[Message, ...], reading: RowReading, name: str = "message"
) -> Example:
    messages = arranged(_with_system(fields, messages, reading), reading, name, _first(fields))
    tools = _tools(fields, reading)
    return Example(row.path, row.line, asked_nulls(messages, tools, reading), tools)


def _pair(
    row: RawRow, fields: Mapping[str, Any], question: str, plain: str, answer_key: str, reading: RowReading
) -> Example:
    """Build an example of a question and an answer, as a conversation and in plain form.

    With earlier turns there is no plain form: it would be without them.
    """
    answer = _answer(fields, answer_key, reading)
    turns = (Message("user", question), Message("assistant", answer))
    if REASONING in fields:
        turns = with_reasoning(turns, fields[REASONING], reading)
    if "history" in fields:
        turns = read_history(fields["history"], reading) + turns
        return _chat(row, fields, turns, reading, "history and row: message")
    messages = _with_system(fields, turns, reading)
    prompt = f"{messages[0].content}\n\n{plain}" if "system" in fields else plain
    return Example(row.path, row.line, messages, _tools(fields, reading), prompt, answer)


def _answer(fields: Mapping[str, Any], key: str, reading: RowReading) -> str:
    answer = text_of(fields[key], key, reading)
    if not answer.strip():
        raise RowError(f"{key}: is blank, so there is nothing to train on")
    return answer


def _tools(fields: Mapping[str, Any], reading: RowReading) -> tuple[Mapping[str, Any], ...]:
    """Read `tools`, or the `functions` that OpenAI had before them, in the form of tools."""
    if "tools" not in fields and "functions" not in fields:
        return ()
    tools = read_tools(fields.get("tools", []), "tools", reading)
    functions = read_tools(fields.get("functions", []), "functions", reading)
    if tools and functions:
        raise RowError("functions: the row has tools already; keep one of them")
    return tools or tuple(
        function if "function" in function else {"type": "function", "function": function} for function in functions
    )


def _with_system(fields: Mapping[str, Any], messages: tuple[Message, ...], reading: RowReading) -> tuple[Message, ...]:
    if "system" not in fields:
        return messages
    system = text_of(fields["system"], "system", reading)
    if messages[0].role != "system":
        return (Message("system", system), *messages)
    if messages[0].content.strip() != system.strip():
        raise RowError("system: the conversation has another system message already; keep one of them")
    return messages


def _first(fields: Mapping[str, Any]) -> int:
    """Return the number of the first message: 0 for one from `system`, so that the rest have the file's numbers."""
    return 0 if "system" in fields else 1


def _not_trained_on(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(message, train=False) if message.role == "assistant" else message for message in messages)


def _trained_from(first: int, example: Example) -> Example:
    """Return the example without training on the messages before this one."""
    return replace(example, messages=_not_trained_on(example.messages[:first]) + example.messages[first:])


def _is_string(value: Any) -> bool:
    return isinstance(value, str) or is_scalar(value)


def _are_strings(fields: Mapping[str, Any], *keys: str) -> bool:
    """Return whether these one or two keys hold texts. Raises RowError if only one of two does."""
    are_strings = {_is_string(fields[key]) for key in keys}
    if len(are_strings) > 1:
        got = " and ".join(type(fields[key]).__name__ for key in keys)
        names = " and ".join(f"'{key}'" for key in keys)
        raise RowError(f"{names} must both be strings or both lists of messages: got {got}")
    return are_strings == {True}
