"""Convert rows in any supported format to examples.

| format            | keys (optional ones in brackets)                                                     |
|-------------------|--------------------------------------------------------------------------------------|
| preference        | chosen, rejected [prompt, system, tools]: strings, or lists of messages               |
| messages          | messages: [{role, content}, …] [tools]                                                |
| sharegpt          | conversations: [{from, value}, …] [system, tools]                                     |
| prompt_completion | prompt, completion [system, tools]: two strings, or two lists of messages             |
| alpaca            | instruction, output [input, system]                                                   |
| text              | text                                                                                  |

Null counts as absent everywhere, a blank string only for an optional key. A string in place of a list or an object is
parsed as JSON. An answer or a text must not be blank; a prompt may be.

A format of strings gives a conversation, for models with a chat template, and a plain form: `prompt` and `completion`,
with `system` and a blank line before the prompt; the plain form cannot include tools. If the messages come in two
parts, only the second part is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dualtune.data.chat.conversations import Message, check_conversation, listed, read_messages, read_tools, text
from dualtune.data.sources.rows import BadRow, RawRow, RowError
from dualtune.errors import DataError

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


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation, a prompt and completion, or both: whether the model has a chat template decides which is used."""

    path: str
    line: int
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of functions, for the template
    prompt: str | None = None  # plain form: what the model sees…
    completion: str | None = None  # …and what it generates
    rejected: tuple[Message, ...] | str | None = None  # the worse answer, instead of the last message or completion
    is_text: bool = False  # plain text: no turns, every token is a target, split if too long

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Format:
    convert: Callable[[RawRow, Mapping[str, Any]], Example]
    keys: tuple[str, ...]  # every row has them
    optional: tuple[str, ...] = ()

    @property
    def all_keys(self) -> tuple[str, ...]:
        return self.keys + self.optional


def to_examples(rows: Iterable[RawRow | BadRow], format: str, columns: Mapping[str, str]) -> Iterator[Example | BadRow]:
    """Convert rows of a named format, or of the format detected from the first good row ("auto").

    `columns` maps our key to the file's, for instance {"prompt": "question", "completion": "answer"}.
    Raises DataError for faults of all rows: `columns` that do not fit the format, a first row in no known format.
    """
    name = "" if format == "auto" else format
    if name:
        _check_columns(columns, FORMATS[name].all_keys, f"the format {name} has")
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        name = name or detect_format(row, columns)
        yield _convert(row, name, columns)


def detect_format(row: RawRow, columns: Mapping[str, str]) -> str:
    """Return the first format with all keys in the row, after the column mapping. Raises DataError if none fits."""
    names = _formats_of(row, columns)
    for name in names:
        if columns.keys() <= set(FORMATS[name].all_keys):
            return name
    if names:
        _check_columns(columns, FORMATS[names[0]].all_keys, f"the format {names[0]} has")
    _check_columns(columns, [key for format in FORMATS.values() for key in format.all_keys], "the formats have")
    known = "; ".join(f"{name} ({', '.join(format.keys)})" for name, format in FORMATS.items())
    raise DataError(
        f"{row.where}: no known format has the keys {listed(row.fields)}. Known: {known}. "
        "Map other names with data.columns, for example columns: {prompt: question, completion: answer}."
    )


def _formats_of(row: RawRow, columns: Mapping[str, str]) -> list[str]:
    def has(key: str) -> bool:
        return row.fields.get(columns.get(key, key)) is not None

    return [name for name, format in FORMATS.items() if all(map(has, format.keys))]


def _check_columns(columns: Mapping[str, str], known: Iterable[str], owner: str) -> None:
    known = dict.fromkeys(known)
    if unknown := sorted(columns.keys() - known.keys()):
        raise DataError(f"data.columns: got '{unknown[0]}', {owner}: {', '.join(known)}")


def _convert(row: RawRow, name: str, columns: Mapping[str, str]) -> Example | BadRow:
    format = FORMATS[name]
    try:
        fields = {key: row.fields.get(columns.get(key, key)) for key in format.all_keys}
        for key in format.keys:
            if fields[key] is None:
                raise RowError(_lacks(row, name, columns.get(key, key)))
        absent = {key for key in format.optional if fields[key] is None or _is_blank(fields[key])}
        fields = {key: value for key, value in fields.items() if key not in absent}
        return format.convert(row, fields)
    except RowError as reason:
        return BadRow(row.path, row.line, str(reason))
    except RecursionError:
        return BadRow(row.path, row.line, "is nested too deeply")


def _lacks(row: RawRow, name: str, key: str) -> str:
    reason = f"has no '{key}'; its keys are: {listed(row.fields)}"
    others = _formats_of(row, {})
    if not others or name in others:
        return reason
    return f"{reason}; this row looks like {others[0]}, but the file is read as {name}: all rows need the same format"


# --- one row of each format ------------------------------------------------------------------------------------------


def _messages(row: RawRow, fields: Mapping[str, Any]) -> Example:
    return _chat(row, fields, read_messages(fields["messages"], "messages"))


def _sharegpt(row: RawRow, fields: Mapping[str, Any]) -> Example:
    return _chat(row, fields, read_messages(fields["conversations"], "conversations"))


def _prompt_completion(row: RawRow, fields: Mapping[str, Any]) -> Example:
    if _are_strings(fields, "prompt", "completion"):
        prompt = text(fields["prompt"], "prompt")
        return _pair(row, fields, prompt, prompt, "completion")
    before = read_messages(fields["prompt"], "prompt", "prompt: message")
    answer = read_messages(fields["completion"], "completion", "completion: message")
    if all(message.role != "assistant" for message in answer):
        raise RowError("completion: has no assistant message, so there is nothing to train on")
    return _chat(row, fields, _not_trained_on(before) + answer, "prompt and completion: message")


def _alpaca(row: RawRow, fields: Mapping[str, Any]) -> Example:
    instruction = text(fields["instruction"], "instruction")
    given = text(fields.get("input", ""), "input")
    plain = (ALPACA_INPUT_PROMPT if given else ALPACA_PROMPT).format(instruction=instruction, input=given)
    return _pair(row, fields, f"{instruction}\n\n{given}" if given else instruction, plain, "output")


def _text(row: RawRow, fields: Mapping[str, Any]) -> Example:
    return Example(row.path, row.line, prompt="", completion=_answer(fields, "text"), is_text=True)


def _preference(row: RawRow, fields: Mapping[str, Any]) -> Example:
    if _are_strings(fields, "chosen", "rejected"):
        if "prompt" not in fields:
            raise RowError("has no 'prompt', which is needed if 'chosen' and 'rejected' are strings")
        prompt, rejected = text(fields["prompt"], "prompt"), _answer(fields, "rejected")
        example = replace(_pair(row, fields, prompt, prompt, "chosen"), rejected=rejected)
        if example.completion == rejected:
            raise RowError("'chosen' and 'rejected' are the same")
        return example
    chosen, rejected = _whole(fields, "chosen"), _whole(fields, "rejected")
    if chosen == rejected:
        raise RowError("'chosen' and 'rejected' are the same")
    if chosen[:-1] != rejected[:-1]:
        raise RowError("'chosen' and 'rejected' may differ only in their last message")
    return Example(row.path, row.line, chosen, _tools(fields), rejected=rejected[-1:])


def _whole(fields: Mapping[str, Any], key: str) -> tuple[Message, ...]:
    """Return the whole conversation. The value holds only the answer to `prompt`, or the messages before it too."""
    messages = read_messages(fields[key], key, f"{key}: message")
    if messages[-1].role != "assistant":
        raise RowError(f"{key}: must end with an assistant message, got a {messages[-1].role} message")
    prompt = _prompt_messages(fields)
    if messages[0].role == "assistant":
        messages = prompt + messages
    elif any(message not in messages for message in prompt):
        raise RowError(f"{key}: is a whole conversation, but does not contain the messages of 'prompt'")
    messages = _with_system(fields, _not_trained_on(messages[:-1]) + messages[-1:])
    check_conversation(messages, f"{key} with its prompt: message", _first(fields))
    return messages


def _prompt_messages(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    if "prompt" not in fields:
        return ()
    if isinstance(fields["prompt"], str):
        return (Message("user", text(fields["prompt"], "prompt")),)
    return read_messages(fields["prompt"], "prompt", "prompt: message")


# In order of detection: the most specific keys first.
FORMATS = {
    "preference": Format(_preference, ("chosen", "rejected"), ("prompt", "system", "tools")),
    "messages": Format(_messages, ("messages",), ("tools",)),
    "sharegpt": Format(_sharegpt, ("conversations",), ("system", "tools")),
    "prompt_completion": Format(_prompt_completion, ("prompt", "completion"), ("system", "tools")),
    "alpaca": Format(_alpaca, ("instruction", "output"), ("input", "system")),
    "text": Format(_text, ("text",)),
}


# --- parts -----------------------------------------------------------------------------------------------------------


def _chat(row: RawRow, fields: Mapping[str, Any], messages: tuple[Message, ...], name: str = "message") -> Example:
    messages = _with_system(fields, messages)
    check_conversation(messages, name, _first(fields))
    return Example(row.path, row.line, messages, _tools(fields))


def _pair(row: RawRow, fields: Mapping[str, Any], question: str, plain: str, answer_key: str) -> Example:
    """Build an example of a question and an answer, as a conversation and in plain form."""
    answer = _answer(fields, answer_key)
    messages = _with_system(fields, (Message("user", question), Message("assistant", answer)))
    prompt = f"{messages[0].content}\n\n{plain}" if "system" in fields else plain
    return Example(row.path, row.line, messages, _tools(fields), prompt, answer)


def _answer(fields: Mapping[str, Any], key: str) -> str:
    answer = text(fields[key], key)
    if _is_blank(answer):
        raise RowError(f"{key}: is blank, so there is nothing to train on")
    return answer


def _tools(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return read_tools(fields.get("tools", []))


def _with_system(fields: Mapping[str, Any], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if "system" not in fields:
        return messages
    if messages[0].role == "system":
        raise RowError("system: the conversation has a system message already; keep one of them")
    return (Message("system", text(fields["system"], "system")), *messages)


def _first(fields: Mapping[str, Any]) -> int:
    """Return the number of the first message: 0 for one from `system`, so that the rest have the file's numbers."""
    return 0 if "system" in fields else 1


def _not_trained_on(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(message, train=False) if message.role == "assistant" else message for message in messages)


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _are_strings(fields: Mapping[str, Any], first: str, second: str) -> bool:
    """Return whether both keys hold strings. Raises RowError if only one does."""
    are = [isinstance(fields[key], str) for key in (first, second)]
    if are[0] != are[1]:
        got = " and ".join(type(fields[key]).__name__ for key in (first, second))
        raise RowError(f"'{first}' and '{second}' must both be strings or both lists of messages: got {got}")
    return are[0]
