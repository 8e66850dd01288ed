"""The record of a model and its adapter in dualtune.json, validated: the file is not trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dualtune.errors import FormatError
from dualtune.evaluate.fingerprints import Entry
from dualtune.io import fields
from dualtune.verify.thresholds import Precision

MAX_ENTRIES, MAX_TOKENS, MAX_TOP = 64, 4096, 1024  # far more than dualtune writes
MAX_ID = 1 << 31
MIN_LOGPROB, MAX_LOGPROB = -1e6, 1e-3  # 0 with room for rounding


@dataclass(frozen=True, slots=True)
class Recorded:
    """The part of dualtune.json that can be recomputed or compared."""

    base_model: Mapping[str, Any]  # its name and hashes
    training: Mapping[str, Any]
    base: list[Entry]  # without the adapter
    adapter: list[Entry]  # with the adapter, for the same tokens
    precision: Precision


def recorded_in(manifest: Mapping[str, Any], where: object) -> Recorded | None:
    """Return the record in a manifest, None if there is none. FormatError if it is malformed."""
    fingerprints = fields.subtable(manifest, "fingerprints", where)
    if not fingerprints:
        return None
    base, adapter = (_entries(fingerprints.get(key), f"{where}: fingerprints.{key}") for key in ("base", "adapter"))
    if [(e["tokens"], _num_tops(e)) for e in base] != [(e["tokens"], _num_tops(e)) for e in adapter]:
        raise FormatError(f"{where}: fingerprints: base and adapter were not recorded for the same tokens")
    model = fields.subtable(manifest, "base", where)
    if len(dtypes := {str(entry.get("dtype")) for entry in (*base, *adapter)}) > 1:
        raise FormatError(f"{where}: fingerprints: dtype: got {', '.join(sorted(dtypes))}, must be the same for all")
    precision = Precision(fields.name(model, "loaded_as", where) or "none", fields.name(base[0], "dtype", where))
    return Recorded(model, fields.subtable(manifest, "training", where), base, adapter, precision)


def _entries(value: Any, where: str) -> list[Entry]:
    """Parse at least one entry, each with tokens and the most probable next tokens."""
    if not _is_list(value, MAX_ENTRIES, _is_entry):
        raise FormatError(f"{where}: malformed. Copy the directory again from where it was trained")
    return value


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    entry = cast(Entry, value)
    tokens, earlier = entry.get("tokens", []), entry.get("earlier", [])
    return (
        _is_list(tokens, MAX_TOKENS, _is_id)
        and _is_top(entry.get("top"))
        and (earlier == [] or _is_list(earlier, len(tokens) - 1, _is_top))
        and isinstance(entry.get("prompt", ""), str)
        and isinstance(entry.get("dtype", ""), str)
    )


def _is_top(value: Any) -> bool:
    """Return whether a value is [[id, log p], …]."""
    return _is_list(value, MAX_TOP, _is_pair)


def _is_pair(value: Any) -> bool:
    return (
        _is_list(value, 2, lambda x: type(x) in (int, float))
        and len(value) == 2
        and _is_id(value[0])
        and MIN_LOGPROB <= value[1] <= MAX_LOGPROB
    )


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_ID


def _is_list(value: Any, longest: int, is_item: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list of 1 to `longest` such items."""
    if not isinstance(value, list):
        return False
    items = cast(list[Any], value)
    return 1 <= len(items) <= longest and all(map(is_item, items))


def _num_tops(entry: Entry) -> int:
    return len(entry.get("earlier", ())) + 1
