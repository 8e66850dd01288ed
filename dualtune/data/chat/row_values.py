"""Values of rows: texts, lists and objects, read with errors that say where they are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from dualtune.data.sources.rows import RowError

SHOWN_CHARACTERS = 60
SHOWN_KEYS = 10


def text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{at}: got {type(value).__name__}, a string is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # valid in JSON, but no tokenizer accepts it
        half = value[error.start].encode("unicode-escape").decode()
        raise RowError(f"{at}: contains an unpaired surrogate ({half}), which is not valid text") from error
    return value


def is_scalar(value: Any) -> bool:
    """Return whether a value is a number or a boolean that JSON has."""
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def from_json(value: Any, at: str) -> Any:
    """Parse a string as JSON and return any other value unchanged. CSV and Parquet hold lists and objects as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise RowError(f"{at}: got a string that is not JSON: {error.msg} at character {error.pos + 1}") from error
    except ValueError as error:  # a number with thousands of digits
        raise RowError(f"{at}: got a string that is not usable JSON: {error}") from error


def as_list(value: Any, at: str) -> list[Any]:
    value = from_json(value, at)
    if not isinstance(value, list):
        raise RowError(f"{at}: got {type(value).__name__}, a list is needed")
    return cast(list[Any], value)


def as_object(value: Any, at: str) -> dict[str, Any]:
    value = from_json(value, at)
    if not isinstance(value, dict):
        raise RowError(f"{at}: got {type(value).__name__}, an object is needed")
    return cast(dict[str, Any], value)


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys with null: tables have a value for every column."""
    return {key: value for key, value in fields.items() if value is not None}


def needed(fields: Mapping[str, Any], key: str, at: str) -> Any:
    if fields.get(key) is None:
        raise RowError(f"{at}: has no '{key}'; its keys are: {listed(fields)}")
    return fields[key]


def shown(value: Any) -> str:
    """Format a value for an error message: short, on one line, printable."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def listed(names: Iterable[Any]) -> str:
    """Format the first names for an error message."""
    printable = [repr(str(name))[1:-1] for name in names]
    more = ["…"] if len(printable) > SHOWN_KEYS else []
    return ", ".join(printable[:SHOWN_KEYS] + more) or "(none)"


def check_texts(value: Any, at: str) -> None:
    """Raise RowError for a lone surrogate in any string of a JSON value."""
    if isinstance(value, str):
        text(value, at)
    elif isinstance(value, Mapping):
        for item in cast(Mapping[Any, Any], value).items():
            check_texts(item, at)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[Any], value):
            check_texts(item, at)
