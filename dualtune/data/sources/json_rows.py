"""Read JSON lines, and code that both JSON readers share.

Python's json is too lenient for rows: of a repeated key it keeps the last value, and it reads NaN. Here either makes a
bad row.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn, cast

from dualtune.data.sources.data_file import HOLDS_NUL, LINE_TOO_LONG, DataFile, Rows
from dualtune.data.sources.rows import BadRow, RawRow, RowError

SMALL = 1 << 18  # characters: a shorter text cannot need much memory
# Python needs at most 88 bytes for a list, object or item, and 200 for a key-value pair.
MAX_STRUCTURE = 20 << 20  # bytes


def read_jsonl(file: DataFile) -> Rows:
    """Read one JSON object per line. Blank lines are skipped."""
    name = file.name
    for number, line in file.lines():
        if line is None:
            yield BadRow(name, number, LINE_TOO_LONG)
        elif not line.isspace():
            try:
                row = RawRow(name, number, json_object(line))
            except RowError as reason:
                row = BadRow(name, number, str(reason))
            yield row


def json_object(line: bytes) -> dict[str, Any]:
    """Return the object in a JSON text. Raises RowError for any other text, and for one that needs much memory."""
    try:
        text = line.decode().rstrip()
        if takes_too_much(text):
            raise RowError("not usable JSON: too many small parts in one row; split it")
        value = DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise RowError(HOLDS_NUL if b"\0" in line else f"not UTF-8 at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        if b"\0" in line:
            raise RowError(HOLDS_NUL) from error
        shown = excerpt(error.doc, error.pos)
        raise RowError(f"not JSON: {error.msg} at column {error.colno}: {shown}") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, a thousand nested brackets
        raise RowError(f"not usable JSON: {error}") from error
    return checked(value)


def checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"got a JSON {type(value).__name__}, a JSON object is needed")
    return cast(dict[str, Any], value)


def takes_too_much(text: str) -> bool:
    """Return whether a value could need much more memory than its text, because it has very many small parts."""
    if len(text) <= SMALL or _structure(text) <= MAX_STRUCTURE:
        return False
    # Brackets and commas within strings do not count.
    return _structure(_STRING.sub("", text.replace(r"\\", "").replace(r"\"", ""))) > MAX_STRUCTURE


def _structure(text: str) -> int:
    return 88 * (text.count("[") + text.count("{") + text.count(",")) + 200 * text.count(":")


def excerpt(text: str, pos: int) -> str:
    return repr(text[max(0, pos - 20) : pos + 20])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise RowError(f"has the key {key[:40]!r} more than once")
    return fields


def _refuse(constant: str) -> NoReturn:
    raise RowError(f"holds {constant}, which is not JSON; write null or a number")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise RowError(f"holds the number {number[:40]}, which is too large")
    return value


_STRING = re.compile(r'"[^"]*"')
DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
SKIMMER = json.JSONDecoder(parse_int=str, parse_float=str)  # lenient: finds the end of a value even in a bad row
