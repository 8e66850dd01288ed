"""Tool calls between a row and a chat template: which nulls are meant, and the form in which a template takes calls."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from dualtune.data.chat.sandbox import TemplateLimit
from dualtune.data.sources.rows import RowError, TableObject

# ----------------------------------------------------------------------------------------------------------------------
# Nulls in tool schemas, in the arguments of calls and in results: which are meant, and which a table has added.
#
# A column of objects has one set of keys for all rows, so Parquet files, and JSON that was made from such tables, have
# a null for each key that an object never had. One rule holds for all files: an argument may be null if the schema of
# its tool requires it and allows null. Every other null is left out.

Schema = Mapping[str, Any]


class CallArguments(dict[str, Any]):
    """The arguments of a tool call; `text` is the JSON text in the row, None if it has an object."""

    def __init__(self, values: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(values)
        self.text = text


def without_nulls(value: Any, schema: Schema | None = None) -> tuple[Any, bool]:
    """Return a JSON value without the nulls in its objects, and whether there were any.

    With a schema, nulls that it requires and allows stay, also those that the reader of a table has put aside.
    """
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value.full if isinstance(value, TableObject) else value)
        properties, required = _mapping(schema, "properties"), (schema or {}).get("required") or ()
        items: dict[str, Any] = {}
        has_dropped = False
        for key, item in table.items():
            inner = cast("Schema | None", properties.get(key))
            if item is not None:
                items[key], dropped = without_nulls(item, inner)
                has_dropped |= dropped
            elif key in required and _allows_null(inner):
                items[key] = None
            else:
                has_dropped = True
        return items, has_dropped
    if isinstance(value, list | tuple):
        pairs = [without_nulls(item, _mapping(schema, "items")) for item in cast("Sequence[Any]", value)]
        return [item for item, _ in pairs], any(dropped for _, dropped in pairs)
    return value, False


def calls_without_nulls(
    calls: Iterable[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Return calls that have only the nulls that their tools ask for, and whether there were others."""
    functions = [_mapping(tool, "function") or tool for tool in tools]
    schemas = {function.get("name"): _mapping(function, "parameters") for function in functions}
    bare: list[dict[str, Any]] = []
    has_dropped = False
    for call in calls:
        function = call["function"]
        arguments, dropped = without_nulls(function["arguments"], schemas.get(function["name"]))
        text = None if dropped else function["arguments"].text
        bare.append({**call, "function": {**function, "arguments": CallArguments(arguments, text)}})
        has_dropped |= dropped
    return bare, has_dropped


def _mapping(value: Schema | None, key: str) -> Mapping[str, Any]:
    """Return the object under a key, empty if there is none."""
    inner = (value or {}).get(key)
    return cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {}


def _allows_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    table = cast("Schema", schema)
    types: Any = table.get("type")
    if types == "null" or (isinstance(types, list) and "null" in types) or table.get("nullable") is True:
        return True
    choices = [*(table.get("anyOf") or ()), *(table.get("oneOf") or ())]
    return None in (table.get("enum") or ()) or any(map(_allows_null, choices))


# ----------------------------------------------------------------------------------------------------------------------
# The form in which a template takes calls: found by trying, once for each template, then the same everywhere.
#
# Templates differ: most walk through the arguments as an object, some join them as text (DeepSeek); some write a call
# only if the content is null, others join that with a text; Mistral's refuse ids that are not of nine characters.

Turn = dict[str, Any]
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]  # messages, tools -> text
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_name",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "probe"}}},
    },
}
PROBE_ARGUMENTS = {"key": "probe_value"}
LONG_ID, NINE_ID = "call_0123456789abcdef01234567", "a1B2c3D4e"
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the messages with calls, and those that answer them, are given to a template."""

    arguments: Literal["object", "text"] = "object"
    content: Literal[""] | None = ""  # beside calls, if nothing is said
    ids: Literal["any", "nine"] = "any"  # nine: nine letters and digits
    needs_ids: bool = False  # a call without one is refused, or leaves a gap in the text
    frames_results: bool = False  # results stand between <tool_response> tags, which those of a row may have already
    writes_calls: bool = False  # False: no form was found in which the template writes a call

    def applied(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages in this form."""
        turns: list[Mapping[str, Any]] = []
        ids: dict[str, Any] = {}  # of the row -> of the template
        open_ids: list[Any] = []  # of the calls that no result has named yet
        number = 0
        for message in messages:
            if self.frames_results and message.get("role") == "tool":
                message = {**message, "content": _without_frame(message.get("content"))}
            if calls := cast("list[Turn]", message.get("tool_calls")):
                calls = [self._call(call, number + i) for i, call in enumerate(calls)]
                for old, new in zip(message["tool_calls"], calls, strict=True):
                    ids[str(old.get("id"))] = new.get("id")
                open_ids = [call["id"] for call in calls if "id" in call]
                number += len(calls)
                content = message["content"] or self.content if "content" in message else self.content
                turns.append({**message, "content": content, "tool_calls": calls})
            elif message.get("role") == "tool" and (self.needs_ids or self.ids != "any"):
                turns.append(self._result(message, ids, open_ids))
            else:
                turns.append(message)
        return turns

    def _call(self, call: Turn, number: int) -> Turn:
        function = call.get("function", call)
        arguments: Any = function.get("arguments")
        if self.arguments == "text" and isinstance(arguments, dict):
            text = arguments.text if isinstance(arguments, CallArguments) else None
            arguments = text or json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        id = self._id(call.get("id"), number)
        return {**call, **({} if id is None else {"id": id}), **({"function": function} if "function" in call else {})}

    def _id(self, id: Any, number: int) -> Any:
        """Return the id for a call: its own if it has one that fits, else one that depends on nothing but the row."""
        if id is None and not self.needs_ids:
            return None
        if id is not None and (self.ids == "any" or (isinstance(id, str) and _NINE.fullmatch(id))):
            return id
        digest = hashlib.sha256(f"{number}".encode() if id is None else f"id {id}".encode()).digest()
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:9])

    def _result(self, message: Mapping[str, Any], ids: Mapping[str, Any], open_ids: list[Any]) -> Mapping[str, Any]:
        """Return a result with the id of its call. Results without ids answer the calls in their order."""
        row_id = message.get("tool_call_id")
        id = None if row_id is None else ids.get(str(row_id))
        if id is None:
            id = open_ids[0] if row_id is None and open_ids else self._id(row_id, 0)
        if id in open_ids:
            open_ids.remove(id)
        return message if id is None else {**message, "tool_call_id": id}


# As the data sets of Hermes have results. Several in one message keep the tags between them.
_FRAMED = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)


_FRAMED_PIECE = re.compile(r"<tool_response>[^<]*</tool_response>")


def _without_frame(content: Any) -> Any:
    framed = _FRAMED.fullmatch(content) if isinstance(content, str) else None
    return framed[1] if framed else content


_FORMS = [
    CallForm(arguments, content, ids, writes_calls=True)
    for arguments in ("object", "text")
    for content in (None, "")
    for ids in ("any", "nine")
]


def call_form(render: Render) -> CallForm:
    """Return the first form in which a template writes a call and, if it can, its result."""
    for tools, has_result in itertools.product(([PROBE_TOOL], []), (True, False)):
        for form in _FORMS:
            probe = _Probe(render, tools, has_result)
            text = probe.rendered(form)
            if text is None or not probe.is_written(text):
                continue
            blank = probe.rendered(replace(form, content="")) or text
            if text.count("None") == blank.count("None"):  # no null as Python writes it
                frames = any(_without_frame(piece) == "probe_result" for piece in _FRAMED_PIECE.findall(text))
                return replace(form, needs_ids=probe.needs_ids(form, text), frames_results=frames)
    return CallForm()


@dataclass(frozen=True, slots=True)
class _Probe:
    """A conversation with a call, and with its result if wanted."""

    render: Render
    tools: Sequence[Mapping[str, Any]]
    has_result: bool

    def rendered(self, form: CallForm, *, has_id: bool = True) -> str | None:
        """Return its text; None if the template refuses it."""
        try:
            return self.render(_conversation(form, self.has_result, has_id), self.tools)
        except (RowError, TemplateLimit):
            return None

    def is_written(self, text: str) -> bool:
        """Return whether call and result are in its text, but no object as Python writes it."""
        has_result = not self.has_result or "probe_result" in text
        return "probe_value" in text and has_result and str(PROBE_ARGUMENTS) not in text

    def needs_ids(self, form: CallForm, text: str) -> bool:
        without = self.rendered(form, has_id=False)
        return without is None or (without != text and without == text.replace(_probe_id(form), ""))


def _conversation(form: CallForm, has_result: bool, has_id: bool) -> list[Turn]:
    id = _probe_id(form)
    arguments = PROBE_ARGUMENTS if form.arguments == "object" else json.dumps(PROBE_ARGUMENTS)
    call: Turn = {"type": "function", "function": {"name": "probe_name", "arguments": arguments}}
    result: Turn = {"role": "tool", "content": "probe_result", "name": "probe_name"}
    if has_id:
        call, result = call | {"id": id}, result | {"tool_call_id": id}
    answer = {"role": "assistant", "content": form.content, "tool_calls": [call]}
    return [{"role": "user", "content": "?"}, answer, *([result] if has_result else [])]


def _probe_id(form: CallForm) -> str:
    return NINE_ID if form.ids == "nine" else LONG_ID
