"""Examples, which rows become: a conversation, a plain text, or both; and how the formats build them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from dualtune.data.chat.conversations import (
    Message,
    RowReading,
    arranged,
    asked_nulls,
    messages_in_text,
    read_history,
    read_tools,
    text_of,
    with_reasoning,
)
from dualtune.data.chat.row_values import PARSED, REASONING, TOOLS_TWICE, is_scalar
from dualtune.data.sources.rows import RawRow, RowError

EQUAL_PAIR = "'chosen' and 'rejected' are the same"  # why such a row is bad
# The same of a pair whose difference is not in the text, such as a space at the end that the template cuts off.
EQUAL_TEXTS = "'chosen' and 'rejected' are the same text: the chat template does not write what differs"


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


# --- the parts of which formats build them ---------------------------------------------------------------------------


def with_conversations(fields: Mapping[str, Any], keys: Sequence[str], reading: RowReading) -> Mapping[str, Any]:
    """Return the fields with lists of messages in place of texts that are such a list as JSON, as tables hold it.

    Either the values of all keys are such lists or none is read so: one alone may be a text about conversations.
    """
    lists = {key: messages_in_text(fields[key], key) for key in keys if isinstance(fields.get(key), str)}
    if not lists or not all(lists.values()) or any(is_string(fields.get(key)) for key in keys if key not in lists):
        return fields
    reading.notices.add(PARSED)
    return {**fields, **lists}


def chat_example(
    row: RawRow, fields: Mapping[str, Any], messages: tuple[Message, ...], reading: RowReading, name: str = "message"
) -> Example:
    messages = arranged(_with_system(fields, messages, reading), reading, name, _first(fields))
    tools = _tools(fields, messages, reading)
    return Example(row.path, row.line, asked_nulls(messages, tools, reading), tools)


def pair_example(
    row: RawRow, fields: Mapping[str, Any], question: str, plain: str, answer_key: str, reading: RowReading
) -> Example:
    """Build an example of a question and an answer, as a conversation and in plain form.

    With earlier turns there is no plain form: it would be without them.
    """
    answer = answer_in(fields, answer_key, reading)
    turns = (Message("user", question), Message("assistant", answer))
    if REASONING in fields:
        turns = with_reasoning(turns, fields[REASONING], reading)
    if "history" in fields:
        turns = read_history(fields["history"], reading) + turns
        return chat_example(row, fields, turns, reading, "history and row: message")
    messages = _with_system(fields, turns, reading)
    prompt = f"{messages[0].content}\n\n{plain}" if "system" in fields else plain
    return Example(row.path, row.line, messages, _tools(fields, messages, reading), prompt, answer)


def answer_in(fields: Mapping[str, Any], key: str, reading: RowReading) -> str:
    answer = text_of(fields[key], key, reading)
    if not answer.strip():
        raise RowError(f"{key}: is blank, so there is nothing to train on")
    return answer


def _tools(
    fields: Mapping[str, Any], messages: Sequence[Message], reading: RowReading
) -> tuple[Mapping[str, Any], ...]:
    """Read `tools`, or the `functions` that OpenAI had before them, in the form of tools."""
    if "tools" not in fields and "functions" not in fields:
        return ()
    tools = read_tools(fields.get("tools", []), "tools", reading)
    functions = read_tools(fields.get("functions", []), "functions", reading)
    if tools and functions:
        raise RowError("functions: the row has tools already; keep one of them")
    tools = tools or tuple(
        function if "function" in function else {"type": "function", "function": function} for function in functions
    )
    if messages[0].role == "system" and _lists(messages[0].content, tools):
        reading.notices.add(TOOLS_TWICE)
    return tools


def _lists(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a text has the names of all these tools in quotes, as JSON or Python writes them."""
    names = [tool.get("function", tool).get("name") for tool in tools]
    return bool(names) and all(f'"{name}"' in text or f"'{name}'" in text for name in names)


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


def not_trained_on(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(message, train=False) if message.role == "assistant" else message for message in messages)


def trained_from(first: int, example: Example) -> Example:
    """Return the example without training on the messages before this one."""
    return replace(example, messages=not_trained_on(example.messages[:first]) + example.messages[first:])


def is_string(value: Any) -> bool:
    return isinstance(value, str) or is_scalar(value)


def are_strings(fields: Mapping[str, Any], *keys: str) -> bool:
    """Return whether these one or two keys hold texts. Raises RowError if only one of two does."""
    are_strings = {is_string(fields[key]) for key in keys}
    if len(are_strings) > 1:
        got = " and ".join(type(fields[key]).__name__ for key in keys)
        names = " and ".join(f"'{key}'" for key in keys)
        raise RowError(f"{names} must both be strings or both lists of messages: got {got}")
    return are_strings == {True}
