"""Rows to examples: the formats that people have, turned into one shape.

| format            | keys                                                              |
|-------------------|-------------------------------------------------------------------|
| messages          | messages: [{role, content}, …]                                    |
| sharegpt          | conversations: [{from, value}, …]                                 |
| prompt_completion | prompt, completion                                                |
| alpaca            | instruction, input (may be absent or empty), output               |
| text              | text                                                              |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dualtune.data.readers import RawRow, raise_problems
from dualtune.errors import DataError

_HALF_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can say it, no tokenizer takes it
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
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
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation, or a plain text in two parts, or both: which is used depends on the model's chat template."""

    where: str
    messages: tuple[Message, ...] = ()
    prompt: str | None = None  # what the plain form shows to the model…
    completion: str | None = None  # …and what it continues with


class RowError(Exception):
    """Why one row cannot be used; collected and reported together as a DataError."""


def to_examples(rows: Sequence[RawRow], format: str, columns: Mapping[str, str]) -> list[Example]:
    """Convert rows of a named format, or of the one that the first row shows ("auto").

    `columns` maps our key to the file's, for instance {"prompt": "question", "completion": "answer"}.
    DataError with every unusable row.
    """
    name = detect_format(rows[0], columns) if format == "auto" else format
    convert, keys = FORMATS[name]
    if unknown := sorted(columns.keys() - set(keys)):
        raise DataError(f"data.columns: got '{unknown[0]}', the format {name} has: {', '.join(keys)}")
    examples: list[Example] = []
    problems: list[str] = []
    for row in rows:
        try:
            fields = {key: _field(row.fields, columns.get(key, key), key == "input") for key in keys}
            examples.append(convert(row.where, fields))
        except RowError as reason:
            problems.append(f"{row.where}: {reason}")
    if problems:
        raise_problems(problems, len(rows))
    return examples


def detect_format(row: RawRow, columns: Mapping[str, str]) -> str:
    """The first format all of whose required keys the row has, after the column mapping."""
    for name, (_, keys) in FORMATS.items():
        if columns.keys() <= set(keys) and all(columns.get(k, k) in row.fields for k in keys if k != "input"):
            return name
    known = "; ".join(f"{name} ({', '.join(keys)})" for name, (_, keys) in FORMATS.items())
    raise DataError(
        f"{row.where}: no known format has the keys {', '.join(row.fields) or '(none)'}. Known: {known}. "
        "Map other names with data.columns, for example columns: {prompt: question, completion: answer}."
    )


def _field(fields: Mapping[str, Any], key: str, optional: bool) -> Any:
    if key not in fields and not optional:
        raise RowError(f"has no '{key}'; its keys are: {', '.join(fields) or '(none)'}")
    return fields.get(key) or "" if optional else fields[key]


def _string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"'{key}': got {type(value).__name__}, a string is needed")
    if half := _HALF_SURROGATE.search(value):
        shown = half[0].encode("unicode-escape").decode()
        raise RowError(f"'{key}': holds half a surrogate pair ({shown}), which is no text")
    return value


def _conversation(where: str, turns: Any, role_key: str, text_key: str, roles: Mapping[str, str]) -> Example:
    if not isinstance(turns, list) or not turns:
        raise RowError("the conversation must be a list with at least one message")
    messages: list[Message] = []
    for number, turn in enumerate(cast(list[Any], turns), start=1):
        if not isinstance(turn, dict):
            raise RowError(f"message {number}: got {type(turn).__name__}, an object is needed")
        fields = cast(dict[str, Any], turn)
        role = str(fields.get(role_key))
        if role not in roles:
            raise RowError(f"message {number}: '{role_key}': got '{role}', allowed: {', '.join(roles)}")
        messages.append(Message(roles[role], _string(fields.get(text_key), f"message {number}: {text_key}")))
    if not any(message.role == "assistant" for message in messages):
        raise RowError("has no assistant message, so there is nothing to learn from")
    if messages[0].role == "assistant":
        raise RowError("starts with an assistant message; a user or system message must come first")
    return Example(where, tuple(messages))


def _messages(where: str, fields: Mapping[str, Any]) -> Example:
    return _conversation(where, fields["messages"], "role", "content", {role: role for role in ROLES})


def _sharegpt(where: str, fields: Mapping[str, Any]) -> Example:
    return _conversation(where, fields["conversations"], "from", "value", SHAREGPT_ROLES)


def _two_parts(where: str, prompt: str, completion: str, chat_prompt: str) -> Example:
    messages = (Message("user", chat_prompt), Message("assistant", completion))
    return Example(where, messages, prompt, completion)


def _prompt_completion(where: str, fields: Mapping[str, Any]) -> Example:
    prompt = _string(fields["prompt"], "prompt")
    return _two_parts(where, prompt, _string(fields["completion"], "completion"), chat_prompt=prompt)


def _alpaca(where: str, fields: Mapping[str, Any]) -> Example:
    instruction, extra = _string(fields["instruction"], "instruction"), _string(fields["input"], "input")
    template = ALPACA_INPUT_PROMPT if extra else ALPACA_PROMPT
    prompt = template.format(instruction=instruction, input=extra)
    chat_prompt = f"{instruction}\n\n{extra}" if extra else instruction
    return _two_parts(where, prompt, _string(fields["output"], "output"), chat_prompt)


def _text(where: str, fields: Mapping[str, Any]) -> Example:
    return Example(where, prompt="", completion=_string(fields["text"], "text"))


# In the order of detection.
FORMATS: dict[str, tuple[Callable[[str, Mapping[str, Any]], Example], tuple[str, ...]]] = {
    "messages": (_messages, ("messages",)),
    "sharegpt": (_sharegpt, ("conversations",)),
    "prompt_completion": (_prompt_completion, ("prompt", "completion")),
    "alpaca": (_alpaca, ("instruction", "input", "output")),
    "text": (_text, ("text",)),
}
