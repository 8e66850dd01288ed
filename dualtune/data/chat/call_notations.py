"""Notations of tool calls: the marks around a call, and in which form the name and the arguments stand between them.

There are four forms: an object of JSON with both; the name, then an object; the name, then one argument after another
between tags; and a call as Python writes it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

from dualtune.data.chat.tools import LONG_ID, NINE_ID

# ----------------------------------------------------------------------------------------------------------------------
# Values in the text of a call: JSON, literals of Python, and texts that the schema of a function gives a type.

Schemas = Mapping[str, Mapping[str, Any]]  # the schema of each parameter of a function
Tools = Mapping[str, Schemas]  # by the name of the function
_TOKEN = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[()\[\]{}"']""", re.DOTALL)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_NAMES = {"true": True, "false": False, "null": None}  # JSON's, which models write between Python's
_REFUSALS = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list, "object": dict,
}  # fmt: skip


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the schemas of the parameters of each function of a request."""
    functions = [cast("Mapping[str, Any]", tool.get("function", tool)) for tool in tools]
    return {function["name"]: _properties(function.get("parameters")) for function in functions}


def _properties(parameters: Any) -> Schemas:
    table: Any = cast("Mapping[str, Any]", parameters).get("properties") if isinstance(parameters, Mapping) else None
    items = cast("Mapping[str, Any]", table).items() if isinstance(table, Mapping) else ()
    return {key: cast("Mapping[str, Any]", schema) for key, schema in items if isinstance(schema, Mapping)}


def json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place, and where it ends; (None, at) if there is none."""
    try:
        return json.JSONDecoder(strict=False, parse_constant=_finite, parse_float=_finite).raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a number of JSON")
    return number


def closed_at(text: str, at: int) -> int | None:
    """Return the end of the brackets that open at a place, None if they are not closed. Quoted ones do not count."""
    waiting: list[str] = []
    for token in _TOKEN.finditer(text, at):
        mark = token[0]
        if mark in _CLOSING:
            waiting.append(_CLOSING[mark])
        elif len(mark) > 1:
            continue
        elif not waiting or mark != waiting.pop():
            return None
        if not waiting:
            return token.end()
    return None


def python_value(text: str) -> Any:
    """Return the value of a literal of Python or JSON; ValueError for any other text."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except _REFUSALS as error:
        raise ValueError(str(error)) from None


def python_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of `name(key=literal, …)`; ValueError for any other text."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("is not a call with named arguments")
        arguments = {cast("str", keyword.arg): _value(keyword.value) for keyword in call.keywords}
        return ast.unparse(call.func), arguments
    except _REFUSALS as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=float() as number):
            return _finite(str(number))
        case ast.Constant(value=None | bool() | int() | str()):
            return node.value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_value(node.operand)
        case _:
            raise ValueError("is not a literal")


def _key(node: ast.expr | None) -> str:
    value = None if node is None else _value(node)
    if not isinstance(value, str):
        raise ValueError("is not the key of an object")
    return value


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the value that a text stands for: what its schema declares, or else JSON; a text that is neither stays."""
    types = _declared(schema or {})
    if types == {"string"}:
        return text
    value, end = json_at(text.strip(), 0)
    if not end or end < len(text.strip()):
        try:
            value = python_value(text)
        except ValueError:
            return text
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    fits = not types or any(_fits(value, name) for name in types)
    return text if isinstance(value, str) or not fits else value


def _fits(value: Any, name: str) -> bool:
    is_type = isinstance(value, _TYPES.get(name, ()))
    return is_type and (name == "boolean" or not isinstance(value, bool))


def _declared(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    types = {entry for entry in [schema.get("type"), *_items(schema, "type")] if isinstance(entry, str)}
    if schema.get("nullable") is True and types:
        types.add("null")
    for entry in [*_items(schema, "anyOf"), *_items(schema, "oneOf")]:
        types |= _declared(cast("Mapping[str, Any]", entry)) if isinstance(entry, Mapping) else set()
    values = [*_items(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    names = ("boolean", *_TYPES)
    return types or {next((name for name in names if _fits(value, name)), "string") for value in values}


def _items(schema: Mapping[str, Any], key: str) -> list[Any]:
    items: Any = schema.get(key)
    return cast("list[Any]", items) if isinstance(items, list) else []


# ----------------------------------------------------------------------------------------------------------------------
# The notations: a form of call, and the marks around it.

ARGUMENT_KEYS = ("arguments", "parameters")
_NAME = r"(?P<name>[^\s{}\[\]<>()]+?)"
_KEY = r"""[^\s<>{}()\[\]"'=:,]+?"""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call that stands in an answer. `id` is None if the notation has none."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


Read = tuple[int, WrittenCall | None]  # where it ends; None: what is there is whole, and not a call


class Body(Protocol):
    """The form of a call."""

    def read(self, text: str, at: int, tools: Tools) -> Read | None:
        """Read the call that begins at a place. None if it is not whole yet, or is none."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectBody:
    """An object with name and arguments: JSON, or as Python writes it."""

    def read(self, text: str, at: int, tools: Tools) -> Read | None:
        if not text.startswith("{", at):
            return None
        value, end = json_at(text, at)
        if end == at:
            closed = closed_at(text, at)
            if closed is None:
                return None
            end = closed
            try:
                value = python_value(text[at:end])
            except ValueError:
                value = None
        return end, call_of(value)


@dataclass(frozen=True, slots=True)
class NamedBody:
    """The name, then what a pattern says, then an object of JSON with the arguments."""

    between: str

    def read(self, text: str, at: int, tools: Tools) -> Read | None:
        begin = re.compile(rf"{_NAME}\s*{self.between}\s*(?=\{{)").match(text, at)
        if not begin:
            return None
        arguments, end = json_at(text, begin.end())
        if not isinstance(arguments, dict):
            return None
        return end, WrittenCall(begin["name"], cast("dict[str, Any]", arguments), begin.groupdict().get("id"))


@dataclass(frozen=True, slots=True)
class Value:
    """What stands around a value: `opening` behind its key, then `next` before another key, or `last`."""

    opening: str
    next: str
    last: str

    def pattern(self, opening: str) -> re.Pattern[str]:
        """Return a pattern of a value, and of the next key; `opening`: how the value of that begins."""
        key = rf"{loose(self.next)}(?P<key>{_KEY})(?={loose(opening)})"
        return re.compile(rf"{loose(self.opening)}(?P<value>.*?)(?:{key}|{loose(self.last)})", re.DOTALL)


@dataclass(frozen=True)
class ArgumentBody:
    """The name, then each key and its value as text. `string` and `other`: around values of these types."""

    first: str  # between the name and the first key
    string: Value
    other: Value
    bare: str | None  # behind the name of a call without arguments

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
        opening = common_prefix(self.string.opening, self.other.opening).rstrip()
        empty = "" if self.bare is None else rf"|{loose(self.bare)}"
        begin = re.compile(rf"{_NAME}(?:{loose(self.first)}(?P<key>{_KEY})(?={loose(opening)}){empty})")
        return begin, self.string.pattern(opening), self.other.pattern(opening)

    def read(self, text: str, at: int, tools: Tools) -> Read | None:
        ends = (mark.split()[-1] for mark in (self.string.last, self.other.last, self.bare or "") if mark.strip())
        if all(text.find(end, at) < 0 for end in ends):
            return None
        begin, string, other = self._patterns
        if not (part := begin.match(text, at)):
            return None
        name, arguments = part["name"], dict[str, Any]()
        while key := part["key"]:
            end = part.end()
            value = string.match(text, end) if self.string != self.other else None
            part = value or other.match(text, end)
            if not part:
                return None
            arguments[key] = value["value"] if value else typed(part["value"], tools.get(name, {}).get(key))
        return part.end(), WrittenCall(name, arguments)


@dataclass(frozen=True, slots=True)
class PythonBody:
    """A call as Python writes it: `name(key="value", other=2)`."""

    def read(self, text: str, at: int, tools: Tools) -> Read | None:
        begin = re.compile(r"[\w.-]+\(").match(text, at)
        end = closed_at(text, begin.end() - 1) if begin else None
        if begin is None or end is None:
            return None
        name = begin[0][:-1]
        try:  # a name may have what Python's have not
            return end, WrittenCall(name, python_call("f" + text[begin.end() - 1 : end])[1])
        except ValueError:
            return end, None


@dataclass(frozen=True)
class CallNotation:
    """Marks around the calls of one form. White space in them is optional."""

    body: Body
    opening: str = ""  # before each call; "": a call is the whole answer, or a member of a list
    preamble: str = ""  # before the first call only
    closing: str = ""  # behind each call
    ending: str = ""  # behind the last call only
    needs_name: bool = False  # only of functions that the request has

    def marks(self, tools: Tools) -> list[str]:
        """Return the texts with one of which a call begins."""
        marks = [mark.split()[0] for mark in (self.preamble, self.opening) if mark]
        return marks + ([f"[{name}(" for name in tools] if isinstance(self.body, PythonBody) else [])

    @property
    def is_whole_answer(self) -> bool:
        return not self.opening and not self.preamble and not isinstance(self.body, PythonBody)

    @property
    def texts(self) -> list[str]:
        """All of the marks."""
        return [mark for mark in (self.preamble, self.opening, self.closing, self.ending) if mark]

    @property
    def tails(self) -> list[str]:
        """What may stand behind a call and belongs to it."""
        return [mark for mark in (self.closing, self.ending) if mark]

    @cached_property
    def _begin(self) -> re.Pattern[str]:
        preamble = rf"(?:{loose(self.preamble)}\s*)?" if self.opening else loose(self.preamble)
        optional = "?" if isinstance(self.body, PythonBody) else ""
        return re.compile(rf"(?:{preamble}{loose(self.opening)}){optional}\s*(?P<list>\[?)\s*")

    def read_first(self, text: str, at: int, tools: Tools) -> tuple[Read, bool] | None:
        """Read a call with its marks. Return it, and whether it is a member of a list."""
        begin = self._begin.match(text, at)
        if begin is None or (isinstance(self.body, PythonBody) and not begin["list"]):
            return None
        read = self.read_next(text, begin.end(), tools)
        return (read, bool(begin["list"])) if read else None

    def read_next(self, text: str, at: int, tools: Tools) -> Read | None:
        """Read a call without its marks."""
        read = self.body.read(text, at, tools)
        is_foreign = self.needs_name or self.is_whole_answer  # any JSON could look like a call
        if read and read[1] and is_foreign and read[1].name not in tools:
            return read[0], None
        return read


def loose(text: str) -> str:
    """Return a pattern for a text whose white space may be missing, and whose ids may be others."""
    parts = re.split(f"({LONG_ID}|{NINE_ID})", text)
    return "".join(
        r"[\w.:-]+"
        if part in (LONG_ID, NINE_ID)
        else "".join(r"\s?" if character.isspace() else re.escape(character) for character in part)
        for part in parts
    )


def common_prefix(*texts: str) -> str:
    same = (i for i, characters in enumerate(zip(*texts, strict=False)) if len({*characters}) > 1)
    return texts[0][: next(same, min(map(len, texts)))]


def call_of(value: Any) -> WrittenCall | None:
    """Return the call that an object of JSON is."""
    if not isinstance(value, Mapping):
        return None
    table = cast("dict[str, Any]", value)
    function = cast("dict[str, Any]", table["function"]) if isinstance(table.get("function"), dict) else table
    arguments = next((function[key] for key in ARGUMENT_KEYS if key in function), None)
    if isinstance(arguments, str):
        arguments = json_at(arguments, 0)[0]
    id, name = table.get("id"), function.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return WrittenCall(name, cast("dict[str, Any]", arguments), id if isinstance(id, str) else None)


_GLM = Value("</arg_key>\n<arg_value>", "</arg_value>\n<arg_key>", "</arg_value>\n</tool_call>")
_CODER = Value(">\n", "\n</parameter>\n<parameter=", "\n</parameter>\n</function>")
# How models write calls, whatever their template does: rows may have them in the text of an answer.
IN_TEXT = (
    *(CallNotation(PythonBody(), "", begin, "", end, needs_name=True) for begin, end in (
        ("<|tool_call_start|>", "<|tool_call_end|>"), ("<|python_start|>", "<|python_end|>"), ("<|python_tag|>", ""),
    )),
    *(CallNotation(ObjectBody(), begin, "", end, needs_name=True) for begin, end in (
        ("<functioncall>", "</functioncall>"), ("<function_call>", "</function_call>"), ("<tool_call>", "</tool_call>"),
        ("<|tool_call_start|>", "<|tool_call_end|>"), ("[TOOL_CALLS]", ""), ("<|python_tag|>", ""),
    )),
    *(CallNotation(NamedBody(between), begin, "", end, needs_name=True) for begin, between, end in (
        ("<function=", ">", "</function>"), ("[TOOL_CALLS]", r"(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?", ""),
    )),
    *(CallNotation(NamedBody(between), "<｜tool▁call▁begin｜>" + begin, "<｜tool▁calls▁begin｜>",
                   end + "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", needs_name=True) for begin, between, end in (
        ("function<｜tool▁sep｜>", r"```json", "```"), ("", "<｜tool▁sep｜>", ""),
    )),
    CallNotation(ArgumentBody("\n<arg_key>", _GLM, _GLM, "\n</tool_call>"), "<tool_call>", needs_name=True),
    CallNotation(ArgumentBody(">\n<parameter=", _CODER, _CODER, ">\n</function>"), "<function=", "<tool_call>", "",
                 "</tool_call>", needs_name=True),
    CallNotation(ObjectBody()),
)  # fmt: skip
