"""Messages: normalize and validate the messages of a row.

A message is {role, content} or ShareGPT's {from, value}, with the role names of either and of LLaMA-Factory, in any
case, and those of `data.roles`. Content is a string or a list of text parts, which are joined; a number or a boolean is
its JSON text. `train: true|false` on an assistant message decides whether its tokens are targets, and `weight` is their
loss weight: 0 excludes them, 1 is the default, which other messages may have too. Tool calls become
{"type": "function", "id"?, "function": {"name", "arguments"}} with an object as arguments, which remembers the row's
text: the chat template decides in which form it is given both (`tools.py`). The result of a tool may be any JSON. All
other keys of a message are passed to the template unchanged. Turns of one role in a row are joined, if they can be
(`data.consecutive`). User, system and tool messages may be blank; an assistant message may be blank only if it is not
trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from dualtune.config.data_section import Consecutive
from dualtune.data.chat.row_values import (
    ALTERNATING,
    JOINED,
    KEPT,
    KEYS_OF_REASONING,
    NULLS,
    SCALAR,
    as_list,
    as_object,
    check_texts,
    from_json,
    is_scalar,
    listed,
    needed,
    present,
    shown,
    text,
)
from dualtune.data.chat.tools import CallArguments, calls_without_nulls, without_nulls
from dualtune.data.sources.rows import RowError, TableObject

MAX_WEIGHT = 1000.0  # of a message: weights are relative, and a larger factor is a mistake
CALL_ROLES = ("function_call", "tool_call")  # roles whose content is a call as JSON, or a list of calls
# What content has that holds a call, whatever its notation: <tool_call>{…}, [add(a=2)], [TOOL_CALLS], Action: add, …
CALL_AS_TEXT = re.compile(r"[<\[({`]|\bAction\b")
# Where the blocks of Anthropic's messages belong, by type.
BLOCKS = {
    "tool_use": "; write it into the tool_calls of the message, with its input as arguments",
    "tool_result": "; write it as a message of its own, with role: tool and its tool_use_id as tool_call_id",
    "thinking": "; write it as reasoning_content of the message",
}
# How a list of messages begins that is written as a text, by json.dumps or by Python's print.
LIST_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content|from|value)\1\s*:""")
# Names are in lower case, with _ between words; a file may have them in any case and with other marks between words.
NAMES_OF_ROLES = {
    "system": "system developer sys",
    "user": "user human prompter",
    "assistant": f"assistant gpt chatgpt bing bard model ai bot chatbot llm {' '.join(CALL_ROLES)}",
    "tool": "tool function ipython observation tool_response tool_result tool_output function_response function_result",
}
ROLES = {name: role for role, names in NAMES_OF_ROLES.items() for name in names.split()}
# The keys read here; all other keys of a message go to the template.
MESSAGE_KEYS = {"role", "content", "from", "value", "train", "weight", "tool_calls", "function_call"}


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation."""

    role: str  # system, user, assistant, tool
    content: str  # "" if the message consists of tool calls
    train: bool = True  # whether an assistant turn is trained on (other roles never are)
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # tool_calls, tool_call_id, name, …
    weight: float = 1.0  # loss weight of the turn; a float32 number above 0

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a chat template sees it."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True, slots=True)
class RowReading:
    """How the messages of a row are read, and the kinds of notices about them."""

    roles: Mapping[str, str] = field(default_factory=lambda: MappingProxyType[str, str]({}))  # data.roles
    consecutive: Consecutive = "join"  # data.consecutive
    columns: Collection[str] = ()  # keys that data.columns names a column for
    notices: set[str] = field(default_factory=set[str])


def read_messages(
    value: Any, key: str, reading: RowReading | None = None, name: str = "message"
) -> tuple[Message, ...]:
    """Read a list of messages and check each one separately. Error messages call a message `name`.

    Texts without a role, as LIMA and UltraChat have them, are the user's and the assistant's in turn.
    """
    reading = reading or RowReading()
    turns = _as_turns(value, key)
    if not turns:
        raise RowError(f"{key}: is empty, at least one message is needed")
    if all(isinstance(turn, str) and not turn.lstrip().startswith("{") for turn in turns):
        reading.notices.add(ALTERNATING)
        turns = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return tuple(_message(turn, f"{name} {number}", reading) for number, turn in enumerate(turns, start=1))


def messages_in_text(value: str, key: str) -> list[Any]:
    """Return the messages, not empty, if a text is a list of them as JSON, as tables hold it; else [].

    Raises RowError for a list that Python has printed, which pandas writes into CSV files: nobody would train on that.
    """
    begins = LIST_AS_TEXT.match(value)
    if begins is None:
        return []
    if begins[1] == "'":
        raise RowError(f"{key}: holds messages as Python prints them; write them as JSON, with json.dumps")
    try:
        turns = json.loads(value)
    except ValueError:
        return []
    is_said = isinstance(turns, list) and all(
        isinstance(turn, dict) and ("role" in turn or {"from", "value"} <= turn.keys())
        for turn in cast(list[Any], turns)
    )
    return cast(list[Any], turns) if is_said else []


def read_history(value: Any, reading: RowReading) -> tuple[Message, ...]:
    """Read the turns before a question: a list of messages, or of [question, answer], of which either may be blank."""
    history = from_json(value, "history")
    if isinstance(history, dict) or any(isinstance(item, dict) for item in as_list(history, "history")):
        return read_messages(history, "history", reading, "history: message")
    turns: list[Message] = []
    for number, item in enumerate(as_list(history, "history"), start=1):
        at = f"history: turn {number}"
        pair = as_list(item, at)
        if len(pair) != 2:
            raise RowError(f"{at}: got a list of {len(pair)}, allowed: [question, answer], or a message")
        for role, content in zip(("user", "assistant"), pair, strict=True):
            turn = "" if content is None else text_of(content, at, reading)
            turns += [Message(role, turn)] if turn.strip() else []
    return tuple(turns)


def _as_turns(value: Any, key: str) -> list[Any]:
    """Return a list of messages, also of one message; an object of lists, as Arrow makes of it, is transposed."""
    value = from_json(value, key)
    columns = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    if not {"role", "from"} & columns.keys():
        return as_list(value, key)
    if not all(isinstance(column, list) for column in columns.values()):
        return [value]
    lengths = {name: len(column) for name, column in columns.items()}
    if len({*lengths.values()}) > 1:
        sizes = ", ".join(f"{size} of '{name}'" for name, size in lengths.items())
        raise RowError(f"{key}: is an object of lists with different lengths: {sizes[:200]}")
    return [dict(zip(columns, column, strict=True)) for column in zip(*columns.values(), strict=True)]


def read_tools(value: Any, key: str = "tools", reading: RowReading | None = None) -> tuple[Mapping[str, Any], ...]:
    """Read the JSON schemas of the functions, without nulls; any part may be JSON in a string."""
    name = key.removesuffix("s")
    schemas = [as_object(tool, f"{name} {number}") for number, tool in enumerate(as_list(value, key), start=1)]
    bare, has_dropped = without_nulls(schemas)
    tools, drops_more = without_nulls([_parsed(tool, f"{name} {number}") for number, tool in enumerate(bare, start=1)])
    if reading and (has_dropped or drops_more):
        reading.notices.add(NULLS)
    check_texts(tools, key)
    return tuple(tools)


def _parsed(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """Return a tool with its function and the parameters of that as objects; a file may have JSON in a string."""
    for key in ("function", "parameters"):
        if isinstance(tool.get(key), str):
            tool = {**tool, key: as_object(tool[key], f"{at}: {key}")}
    if isinstance(tool.get("function"), dict):
        tool = {**tool, "function": _parsed(tool["function"], at)}
    return tool


def arranged(
    messages: Sequence[Message], reading: RowReading, name: str = "message", first: int = 1
) -> tuple[Message, ...]:
    """Return a conversation with turns of one role in a row joined, if that is wanted and they can be.

    Raises RowError if a message is in an invalid position. `first` is the number of the first message. Whether an
    assistant may begin, or follow its own calls, is for the chat template to say.
    """
    _check_order(messages, reading, name, first)
    turns: list[Message] = []
    for message in messages:
        if not turns or not _is_repeated(turns[-1], message):
            turns.append(message)
        elif reading.consecutive == "join" and _can_join(turns[-1], message):
            contents = [turn.content for turn in (turns[-1], message) if turn.content.strip()]
            extra = {**turns[-1].extra, **message.extra}
            turns[-1] = replace(turns[-1], content="\n\n".join(contents), extra=extra)
            reading.notices.add(JOINED)
        else:
            turns.append(message)
            reading.notices.add(KEPT)
    return tuple(turns)


def _check_order(messages: Sequence[Message], reading: RowReading, name: str, first: int) -> None:
    previous: Message | None = None
    calls: list[dict[str, Any]] = []  # the calls that a tool message may answer
    for number, message in enumerate(messages, start=first):
        at = f"{name} {number}"
        if previous and _is_repeated(previous, message) and reading.consecutive == "refuse":
            raise RowError(
                f"{at}: the second {message.role} message in a row; set data.consecutive to join or keep, "
                "or add what was between them"
            )
        if message.role == "tool":
            _check_answer(message, calls, at)
        else:
            as_text = message.role == "assistant" and CALL_AS_TEXT.search(message.content)
            calls = message.extra.get("tool_calls", [{}] if as_text else [])
        if message.role == "assistant" and message.train and not (message.content.strip() or calls):
            raise RowError(f"{at}: the assistant's answer is blank; fill it in, or set train: false")
        previous = message
    if all(message.role != "assistant" for message in messages):
        raise RowError("has no assistant message, so there is nothing to train on")


def _is_repeated(message: Message, following: Message) -> bool:
    """Return whether two turns are of one role that takes turns. An answer after calls is another turn."""
    return message.role == following.role in ("user", "assistant") and "tool_calls" not in message.extra


def _can_join(message: Message, following: Message) -> bool:
    """Return whether nothing but the border between two turns is lost if they are joined."""
    extra = {key: value for key, value in following.extra.items() if key != "tool_calls"}
    same = message.role == "user" or (message.train, message.weight) == (following.train, following.weight)
    return same and all(key in message.extra and message.extra[key] == value for key, value in extra.items())


def asked_nulls(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], reading: RowReading
) -> tuple[Message, ...]:
    """Return the messages; in the arguments of calls, only the nulls that the tools ask for are left."""
    turns: list[Message] = []
    for message in messages:
        if calls := message.extra.get("tool_calls"):
            calls, has_dropped = calls_without_nulls(calls, tools)
            reading.notices.update({NULLS} if has_dropped else ())
            message = replace(message, extra={**message.extra, "tool_calls": calls})
        turns.append(message)
    return tuple(turns)


def fold_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the conversation with each system message put before the user message that follows it.

    It is the same object if there is none to put anywhere: no system message with a text, or no user message after one.
    """
    turns: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting += [message.content] if message.content.strip() else []
        elif message.role == "user" and waiting:
            turns.append(replace(message, content="\n\n".join([*waiting, message.content])))
            waiting = []
        else:
            turns.append(message)
    return messages if waiting or all(message.role != "system" for message in messages) else tuple(turns)


def with_reasoning(messages: tuple[Message, ...], value: Any, reading: RowReading) -> tuple[Message, ...]:
    """Return messages with one answer, which gets the reasoning of a column; not if the answer repeats it.

    If the answer has other reasoning, or there are several, the column stays unread; RowError if data.columns names it.
    """
    thought = "\n\n".join(texts_of(value, "reasoning", reading))
    answers = [message for message in messages if message.role == "assistant"]
    own = [str(answer.extra[key]) for answer in answers for key in KEYS_OF_REASONING if answer.extra.get(key)]
    own += [thoughts for answer in answers if (thoughts := answer.content.rpartition("</think>")[0])]
    needle, *texts = ("".join(text.split()) for text in (thought, *own, *(answer.content for answer in answers)))
    if any(needle in text and (own or len(needle) > len(text) / 2) for text in texts):  # not a word that both have
        return messages
    if len(answers) == 1 and not own:
        thinking = replace(answers[0], extra={**answers[0].extra, "reasoning_content": thought})
        return tuple(thinking if message is answers[0] else message for message in messages)
    if "reasoning" in reading.columns:
        reason = "there are several answers" if len(answers) > 1 else "the answer has other reasoning already"
        raise RowError(f"reasoning: {reason}; keep one of them, or set data.columns: {{reasoning: null}}")
    return messages


def _check_answer(message: Message, calls: Sequence[Mapping[str, Any]], at: str) -> None:
    if not calls:
        raise RowError(
            f"{at}: a tool message must follow an assistant message with tool_calls or another tool message, or one "
            "with a call in its content"
        )
    ids = [call["id"] for call in calls if "id" in call]
    if ids and "tool_call_id" in message.extra and message.extra["tool_call_id"] not in ids:
        got = shown(message.extra["tool_call_id"])
        raise RowError(f"{at}: tool_call_id: got {got}, the calls before it have: {listed(ids)}")


def _message(value: Any, at: str, reading: RowReading) -> Message:
    fields = present(as_object(value, at))
    role_key, text_key = ("from", "value") if "from" in fields and "role" not in fields else ("role", "content")
    # Role and weight decide what the rest may be: only an assistant has calls, and only what is trained on needs text.
    name, role = _role(needed(fields, role_key, at), f"{at}: {role_key}", reading.roles)
    weight = _weight(fields, role, at)
    train = weight != 0
    extra = {key: item for key, item in fields.items() if key not in MESSAGE_KEYS}
    for key, item in extra.items():
        check_texts([key, item], f"{at}: {shown(key)}")
    if name in CALL_ROLES and role == "assistant":
        calls, content = from_json(needed(fields, text_key, at), f"{at}: {text_key}"), ""
        calls = cast(list[Any], calls) if isinstance(calls, list) else [calls]
    else:
        calls = as_list(fields.get("tool_calls") or [], f"{at}: tool_calls")
        if "function_call" in fields:  # OpenAI's name for it before there were several
            calls = [*calls, fields["function_call"]]
        is_needed = train and not calls and role != "tool"
        content = needed(fields, text_key, at) if is_needed else fields.get(text_key, "")
        content = (_result if role == "tool" else _content)(content, f"{at}: {text_key}", reading)
    if calls:
        if role != "assistant":
            raise RowError(f"{at}: tool_calls: allowed only in an assistant message, this is a {role} message")
        extra["tool_calls"] = [_tool_call(call, f"{at}: tool call {n}") for n, call in enumerate(calls, start=1)]
    return Message(role, content, train, extra, weight or 1.0)


def _role(value: Any, at: str, roles: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of a role in the form of ROLES, and the role."""
    if isinstance(value, str):
        if not roles and value in ROLES:
            return value, ROLES[value]
        name = re.sub(r"[\s_-]+", "_", value.strip().lower())
        for spelling in (value, value.strip(), name):
            if spelling in roles:
                return name, roles[spelling]
        if name in ROLES:
            return name, ROLES[name]
    allowed = ", ".join({**roles, **ROLES})
    raise RowError(
        f"{at}: got {shown(value)}, allowed: {allowed}. data.roles: {{NAME: user}} says what another name is"
    )


def _content(value: Any, at: str, reading: RowReading) -> str:
    if not isinstance(value, list):
        return text_of(value, at, reading)
    texts: list[str] = []
    for number, item in enumerate(cast(list[Any], value), start=1):
        part = as_object(item, f"{at}: part {number}")
        if part.get("type") != "text":
            advice = BLOCKS.get(str(part.get("type")), "")
            raise RowError(f"{at}: part {number}: got the type {shown(part.get('type'))}, allowed: 'text'{advice}")
        texts.append(text(part.get("text"), f"{at}: part {number}"))
    return "".join(texts)


def _result(value: Any, at: str, reading: RowReading) -> str:
    """Return the result of a tool as text: JSON of an object, or of a list unless it is one of text parts."""
    items = cast(list[Any], value) if isinstance(value, list) else []
    objects = [cast(dict[str, Any], item) for item in items if isinstance(item, dict)]
    is_parts = items and len(items) == len([item for item in objects if item.get("type") == "text"])
    if isinstance(value, dict | list) and not is_parts:
        plain, has_dropped = without_nulls(value)
        reading.notices.update({NULLS} if has_dropped else ())
        return text(json.dumps(plain, ensure_ascii=False), at)
    return _content(value, at, reading)


def _weight(fields: Mapping[str, Any], role: str, at: str) -> float:
    """Return the loss weight of the turn; 1 for other roles, which are never trained on."""
    train, weight = fields.get("train"), fields.get("weight")
    if train is not None and not isinstance(train, bool):
        raise RowError(f"{at}: train: got {shown(train)}, allowed: true or false")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0 <= weight <= MAX_WEIGHT):
        raise RowError(f"{at}: weight: got {shown(weight)}, allowed: a number from 0 to {MAX_WEIGHT:g}")
    if train is not None and weight is not None and train != (weight != 0):
        raise RowError(f"{at}: train and weight contradict each other; keep one of them")
    if role == "assistant":
        return 0.0 if train is False else float(np.float32(1.0 if weight is None else weight))
    if weight not in (None, 0, 1):
        raise RowError(f"{at}: weight: got {weight:g}, allowed in a {role} message: 0 or 1; it is not trained on")
    return 1.0


def _tool_call(value: Any, at: str) -> dict[str, Any]:
    call = as_object(value, at)
    if call.get("type") not in (None, "function"):
        raise RowError(f"{at}: got the type {shown(call['type'])}, allowed: 'function'")
    function = call if call.get("function") is None else as_object(call["function"], f"{at}: function")
    name = text(needed(function, "name", at), f"{at}: name")
    # No arguments: Parquet files have null, some servers write "".
    written: Any = {} if function.get("arguments", {}) in (None, "") else needed(function, "arguments", at)
    values = as_object(written, f"{at}: arguments")
    values = values.full if isinstance(values, TableObject) else values
    arguments = CallArguments(values, written if isinstance(written, str) else None)
    result: dict[str, Any] = {"type": "function"} | ({} if call.get("id") is None else {"id": call["id"]})
    result["function"] = {"name": name, "arguments": arguments}
    check_texts(result, at)
    return result


def text_of(value: Any, at: str, reading: RowReading) -> str:
    """Return a text. A number or a boolean becomes its JSON text, and a notice."""
    if isinstance(value, str) or not is_scalar(value):
        return text(value, at)
    reading.notices.add(SCALAR)
    return json.dumps(value)


def texts_of(value: Any, at: str, reading: RowReading) -> list[str]:
    """Return the texts of a text, or of a list of texts."""
    values = cast(list[Any], value) if isinstance(value, list) else [value]
    return [text_of(item, at, reading) for item in values]
