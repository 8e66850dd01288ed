"""Nulls in tool schemas, in the arguments of calls and in results: which are meant, and which a table has added.

A column of objects has one set of keys for all rows, so Parquet files, and JSON that was made from such tables, have a
null for each key that an object never had. One rule holds for all files: an argument may be null if the schema of its
tool requires it and allows null. Every other null is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from dualtune.data.sources.rows import TableObject

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
        left: dict[str, Any] = {}
        has_dropped = False
        for key, item in table.items():
            inner = cast("Schema | None", properties.get(key))
            if item is not None:
                left[key], dropped = without_nulls(item, inner)
                has_dropped |= dropped
            elif key in required and _allows_null(inner):
                left[key] = None
            else:
                has_dropped = True
        return left, has_dropped
    if isinstance(value, list | tuple):
        items = [without_nulls(item, _mapping(schema, "items")) for item in cast("Sequence[Any]", value)]
        return [item for item, _ in items], any(dropped for _, dropped in items)
    return value, False


def calls_without_nulls(
    calls: Iterable[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Return calls that have only the nulls that their tools ask for, and whether there were others."""
    schemas = {function.get("name"): _mapping(function, "parameters") for function in map(_function, tools)}
    left: list[dict[str, Any]] = []
    has_dropped = False
    for call in calls:
        function = call["function"]
        arguments, dropped = without_nulls(function["arguments"], schemas.get(function["name"]))
        text = None if dropped else function["arguments"].text
        left.append({**call, "function": {**function, "arguments": CallArguments(arguments, text)}})
        has_dropped |= dropped
    return left, has_dropped


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(tool, "function") or tool


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
