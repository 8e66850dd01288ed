"""Typed access to the values of untrusted JSON, with errors of the form `file: key: got X, must be Y`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

from dualtune.base.errors import FormatError

Table = Mapping[str, Any]


def wrong(where: object, key: str, value: object, allowed: str) -> FormatError:
    return FormatError(f"{where}: {shown(key)}: got {text_of(value)[:200]!r}, must be {allowed}")


def text_of(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # Python does not print integers with thousands of digits
        return "an integer of thousands of digits"


def shown(text: str, limit: int = 100) -> str:
    """Return untrusted text in bounded length, safe for a terminal."""
    cut = text[:limit]
    return (cut if cut.isprintable() else ascii(cut)[1:-1]) + ("…" if len(text) > limit else "")


def number(value: object) -> float | None:
    """Return a number that is finite as a float and far from overflow; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e300 else None


def required(table: Table, key: str, where: object) -> Any:
    if key not in table:
        raise FormatError(f"{where}: {key}: missing")
    return table[key]


def rank(table: Table, key: str, where: object) -> int:
    value = required(table, key, where)
    if type(value) is not int or value < 1:
        raise wrong(where, key, value, "an integer >= 1")
    return value


def positive(table: Table, key: str, where: object) -> float:
    """Return a number from 1e-9 to 1e9, far from overflow. Not 0, which is useless and which llama.cpp reads as 1."""
    value = required(table, key, where)
    if type(value) not in (int, float) or not 1e-9 <= value <= 1e9:
        raise wrong(where, key, value, "a number from 1e-9 to 1e9")
    return float(value)


def probability(table: Table, key: str, where: object) -> float:
    value = required(table, key, where)
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise wrong(where, key, value, "a number >= 0 and < 1")
    return float(value)


def name(table: Table, key: str, where: object) -> str | None:
    """Return a printable string, or None if it is absent or null."""
    value = table.get(key)
    if value is not None and not (isinstance(value, str) and value.isprintable()):
        raise wrong(where, key, value, "a printable string or null")
    return value


def texts(table: Table, key: str, where: object) -> list[str] | None:
    """Return a list of strings, or None if it is absent or null."""
    value = table.get(key)
    if value is None:
        return None
    items = cast("list[object]", value if isinstance(value, list) else [value])
    if items == [value] or not all(isinstance(item, str) for item in items):
        raise wrong(where, key, items, "a list of strings")
    return cast("list[str]", items)


def subtable(table: Table, key: str, where: object) -> dict[str, Any]:
    """Return an object, empty if it is absent or null."""
    value = table.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(where, key, value, "an object")
    return cast("dict[str, Any]", value)


def repeated_key(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return the key that is most often given, of an object with a key that is given more than once."""
    return Counter(key for key, _ in pairs).most_common(1)[0][0]
