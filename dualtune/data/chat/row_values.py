"""Columns and values of rows: which column holds a key of the format, and texts, lists and objects, read with errors
that say where they are.

A key has the column that `data.columns` names, or one of its usual names; reasoning has one whose name says so."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from dualtune.data.chat.notices import ABOUT, CONTENT, REASONING_WORDS, words_of
from dualtune.data.sources.rows import RowError
from dualtune.errors import DataError

SHOWN_CHARACTERS = 60
SHOWN_KEYS = 10
# Keys for the reasoning of an answer. Whichever a row uses, the template gets it under the first two.
KEYS_OF_REASONING = ("reasoning_content", "thinking", "reasoning")
Columns = Mapping[str, str | None]  # data.columns: from our key to the file's; null leaves a key out
REASONING = "reasoning"  # the key of the reasoning of an answer in a column of its own
SYSTEM_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({"system": ("system_prompt", "system_message")})
# If a row has several columns of reasoning, the first of these is read; other names only where they are the only one.
_NAMES = (*KEYS_OF_REASONING, "cot", "chain_of_thought", "rationale", "thought", "thoughts")
# Words for what else a column holds: cot_answer is an answer, reasoning_prompt a prompt, and both stay unread.
_OTHER = ABOUT | (CONTENT - REASONING_WORDS - {"content", "text"})


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


# --- columns ---------------------------------------------------------------------------------------------------------


def column_of(
    key: str, keys: Iterable[str], aliases: Mapping[str, tuple[str, ...]], fields: Mapping[str, Any], columns: Columns
) -> str:
    """Return the column of a row that holds a key of its format, or would hold it if it were not left out.

    `keys` are all keys of the format, `aliases` other names of a key, used where a row has none of its own name.
    """
    name = columns.get(key) or key
    taken = {column for column in columns.values() if column}
    if columns.get(key):
        return name
    if key == REASONING:
        others = (each for other in keys if other != key for each in (other, *aliases.get(other, ())))
        return _column_of_reasoning(fields, taken.union(others)) or name
    if has_value(fields, name):
        return name
    return next((each for each in aliases.get(key, ()) if each not in taken and has_value(fields, each)), name)


def has_value(fields: Mapping[str, Any], key: str) -> bool:
    """Return whether a row has a value for a key that may be absent; null, [] and blank text are none."""
    value = fields.get(key)
    return value is not None and value != [] and not (isinstance(value, str) and not value.strip())


def left_out(columns: Columns) -> set[str]:
    return {key for key, column in columns.items() if column is None}


def check_columns(
    columns: Columns, every: Iterable[str], owner: str, keys: Iterable[str], needed: Iterable[str] = ()
) -> None:
    """Check data.columns against the keys of a format, or of all formats (`owner` says which).

    Raises DataError for a key that no format has (`every`), a column for a key that is not in `keys`, or null for one
    that is `needed`.
    """
    without = left_out(columns)
    if unknown := sorted(columns.keys() - {*every}) or sorted(columns.keys() - without - {*keys}):
        raise DataError(f"data.columns: got '{unknown[0]}', {owner}: {', '.join(dict.fromkeys(keys))}")
    if missing := sorted(without & {*needed}):
        raise DataError(f"data.columns: got null for '{missing[0]}', which {owner.removesuffix(' has')} needs")


def _column_of_reasoning(fields: Mapping[str, Any], taken: Collection[str]) -> str | None:
    """Return the column with the reasoning of an answer, going by its name; None if there is none, or several."""
    names = [name for name, value in fields.items() if name not in taken and _is_named_so(name) and _is_said(value)]
    return next((name for name in _NAMES if name in names), names[0] if len(names) == 1 else None)


def _is_named_so(name: Any) -> bool:
    words = words_of(name) if isinstance(name, str) else frozenset[str]()
    return bool(words & REASONING_WORDS) and not words & _OTHER


def _is_said(value: Any) -> bool:
    texts = cast(list[Any], value) if isinstance(value, list) else [value]
    return all(isinstance(each, str) for each in texts) and any(each.strip() for each in texts)
