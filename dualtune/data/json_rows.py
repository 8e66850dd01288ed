"""JSON to rows: JSON lines, one by one, and a whole .json file.

Python's json takes more than a row should be: of a repeated key it keeps the last, and it reads NaN. Here each makes a
bad row.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Generator
from typing import Any, NoReturn, cast

from dualtune.data.data_file import HOLDS_NUL, LINE_TOO_LONG, DataFile, Rows
from dualtune.data.rows import BadRow, RawRow, RowError
from dualtune.errors import DataError


def read_jsonl(file: DataFile) -> Rows:
    """One JSON object a line. Blank lines are skipped."""
    name = file.name
    for number, line in file.lines():
        if line is None:
            yield BadRow(name, number, LINE_TOO_LONG)
        elif not line.isspace():
            try:
                row = RawRow(name, number, _object(line))
            except RowError as reason:
                row = BadRow(name, number, str(reason))
            yield row


def read_json(file: DataFile) -> Rows:
    """An array of objects, an object that holds one such array, or JSON lines under another name.

    The file is held in memory as a whole. DataError where the syntax is broken: nobody can say where the next element
    would start.
    """
    text = _whole_text(file)
    start = _skip_blanks(text, 0)
    if start == len(text):
        return
    try:
        if not text.startswith("{", start):
            end = yield from _elements(file, text, start)
            if (end := _skip_blanks(text, end)) < len(text):
                raise json.JSONDecodeError("Extra data behind the array", text, end)
            return
        end = _SKIMMER.raw_decode(text, start)[1]
        if _skip_blanks(text, end) == len(text):
            yield from _elements(file, text, _array_inside(file, text, start))
            return
    except json.JSONDecodeError as error:
        hint = f" ({HOLDS_NUL})" if "\0" in text else ""
        where = f"{file.path}:{error.lineno}:{error.colno}"
        raise DataError(f"{where}: not JSON: {error.msg}: {_excerpt(text, error.pos)}{hint}") from error
    except RecursionError as error:
        raise DataError(f"{file.path}: nested too deeply to be read") from error
    file.stream = file.raw = io.BytesIO(text.encode())
    file.size = len(file.stream.getbuffer())
    yield from read_jsonl(file)


def _object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode().rstrip()
        value = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise RowError(HOLDS_NUL if b"\0" in line else f"not UTF-8 at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        if b"\0" in line:
            raise RowError(HOLDS_NUL) from error
        excerpt = _excerpt(error.doc, error.pos)
        raise RowError(f"not JSON: {error.msg} at column {error.colno}: {excerpt}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise RowError(f"not usable JSON: {error}") from error
    return _checked(value)


def _checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"got a JSON {type(value).__name__}, a JSON object is needed")
    return cast(dict[str, Any], value)


def _whole_text(file: DataFile) -> str:
    data = file.stream.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise DataError(f"{file.path}:{line}: not UTF-8 at byte {column} of the line") from error


def _elements(file: DataFile, text: str, pos: int) -> Generator[RawRow | BadRow, None, int]:
    """The elements of the array at `pos`, each with the line that it starts on; returns the position behind it."""
    if not text.startswith("[", pos):
        raise json.JSONDecodeError("an array of objects is needed", text, pos)
    line, counted = 1, 0
    pos = _skip_blanks(text, pos + 1)
    more = not text.startswith("]", pos)
    while more:
        line += text.count("\n", counted, pos)
        counted = pos
        row, pos = _element(file.name, line, text, pos)
        file.done = pos / len(text)
        yield row
        pos = _skip_blanks(text, pos)
        if text[pos : pos + 1] not in (",", "]"):
            raise json.JSONDecodeError("Expecting ',' or ']'", text, pos)
        more = text[pos] == ","
        pos = _skip_blanks(text, pos + more)
    return pos + 1


def _element(name: str, line: int, text: str, pos: int) -> tuple[RawRow | BadRow, int]:
    try:
        value, end = _DECODER.raw_decode(text, pos)
        return RawRow(name, line, _checked(value)), end
    except json.JSONDecodeError:
        raise
    except (RowError, ValueError) as reason:
        return BadRow(name, line, str(reason)), _SKIMMER.raw_decode(text, pos)[1]


def _array_inside(file: DataFile, text: str, pos: int) -> int:
    """Where the one list of objects starts that the (well-formed) object at `pos` holds."""
    found: dict[str, int] = {}
    keys: list[str] = []
    pos = _skip_blanks(text, pos + 1)
    while text[pos] != "}":
        key, pos = _SKIMMER.raw_decode(text, pos)
        start = _skip_blanks(text, _skip_blanks(text, pos) + 1)  # behind the colon
        value, pos = _SKIMMER.raw_decode(text, start)
        keys.append(key[:40])
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in cast(list[Any], value)):
            found[key] = start
        pos = _skip_blanks(text, pos)
        pos = _skip_blanks(text, pos + (text[pos] == ","))
    if len(found) != 1:
        shown, lists = (", ".join(names[:10]) + (", …" if len(names) > 10 else "") for names in (keys, [*found]))
        raise DataError(
            f"{file.path}: got one object with the keys {shown or '(none)'}; an array of objects is needed, "
            f"or an object with exactly one list of objects in it (here: {lists or 'none'})"
        )
    return next(iter(found.values()))


def _skip_blanks(text: str, pos: int) -> int:
    blanks = _BLANKS.match(text, pos)
    assert blanks
    return blanks.end()


def _excerpt(text: str, pos: int) -> str:
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


_BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
_SKIMMER = json.JSONDecoder(parse_int=str, parse_float=str)  # takes what is only bad for a row, to find where it ends
