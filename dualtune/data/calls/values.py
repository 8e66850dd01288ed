"""Values in the text of a call: JSON, literals of Python, and texts that the schema of a function gives a type."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

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
    return {key: cast("Mapping[str, Any]", each) for key, each in items if isinstance(each, Mapping)}


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
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            raise ValueError("is not a call with named arguments")
        arguments = {cast("str", each.arg): _value(each.value) for each in call.keywords}
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
    fits = not types or any(_fits(value, each) for each in types)
    return text if isinstance(value, str) or not fits else value


def _fits(value: Any, name: str) -> bool:
    is_type = isinstance(value, _TYPES.get(name, ()))
    return is_type and (name == "boolean" or not isinstance(value, bool))


def _declared(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    types = {each for each in [schema.get("type"), *_items(schema, "type")] if isinstance(each, str)}
    if schema.get("nullable") is True and types:
        types.add("null")
    for each in [*_items(schema, "anyOf"), *_items(schema, "oneOf")]:
        types |= _declared(cast("Mapping[str, Any]", each)) if isinstance(each, Mapping) else set()
    values = [*_items(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    return types or {_name(value) for value in values}


def _items(schema: Mapping[str, Any], key: str) -> list[Any]:
    items: Any = schema.get(key)
    return cast("list[Any]", items) if isinstance(items, list) else []


def _name(value: Any) -> str:
    return next((name for name in ("boolean", *_TYPES) if _fits(value, name)), "string")
