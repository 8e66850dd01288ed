"""Read the rows of JSON files, lines or one array: one row at a time is held in memory.

Python's json is too lenient for rows: of a repeated key it keeps the last value, and it reads NaN. Here either makes a
bad row.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
from collections.abc import Generator
from typing import Any, NoReturn, cast

from dualtune.base.errors import DataError
from dualtune.base.fields import repeated_key
from dualtune.data.sources.data_file import HOLDS_NUL, LINE_TOO_LONG, MAX_LINE, DataFile, Rows
from dualtune.data.sources.rows import BadRow, RawRow, RowError, printable

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
        raise RowError(f"has the key {repeated_key(pairs)[:40]!r} more than once")
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

# ----------------------------------------------------------------------------------------------------------------------
# An array in a .json file, which may be larger than the memory: its elements one after another, each with its line.

CHUNK = 1 << 16  # bytes per read
SHOWN = 40  # characters before a fault that the message may show
_BLANKS = re.compile(r"[ \t\n\r]*")
# Finds the end of an element; the group is empty in a string that is not read to its end yet.
_PART = re.compile(r'"(?:[^"\\]++|\\.)*+("?)|[\[\]{}]', re.DOTALL)


def read_json(file: DataFile) -> Rows:
    """Read an array of objects, an object that contains one such array, or JSON lines with the suffix .json.

    Raises DataError for a syntax error, because the start of the next element is then unknown.
    """
    text = _Window(file)
    with text.errors_located():
        if not text.next():
            return
        if text.next() != "{":
            if text.next() != "[":
                raise text.fault("an array of objects is needed")
            yield from _list(text)
            if text.next():
                raise text.fault("Extra data after the array")
            return
        keys, lists = _keys_and_lists(text)
        is_one_object = not text.next()
    # An object that others follow is the first of JSON lines. One alone must name the list that holds the rows.
    file.rewind()
    if not is_one_object:
        yield from read_jsonl(file)
        return
    if len(lists) != 1:
        shown, shown_lists = (", ".join(names[:10]) + (", …" if len(names) > 10 else "") for names in (keys, [*lists]))
        raise DataError(
            f"{file.path}: got one object with the keys {shown or '(none)'}; an array of objects is needed, "
            f"or an object with exactly one list of objects in it (here: {shown_lists or 'none'})"
        )
    text = _Window(file)
    with text.errors_located():
        for number, _ in enumerate(_keys(text)):
            if number == next(iter(lists.values())):
                break
            _skip(text)
        yield from _list(text)


class _Window:
    """A position in the text of a file, with a buffer of the text after it that is filled on demand."""

    def __init__(self, file: DataFile) -> None:
        self._file, self.name = file, file.name
        self._text, self._at = "", 0
        self._undecoded, self._at_end = b"", False
        self._line, self._line_start = 1, 0  # the line number of the position, and where in the text the line starts
        self._read_lines, self._read_bytes = 0, 0  # whole lines that were decoded, and bytes after them

    @contextlib.contextmanager
    def errors_located(self) -> Generator[None]:
        """Convert a syntax error to a DataError with its position."""
        try:
            yield
        except json.JSONDecodeError as error:
            hint = f" ({HOLDS_NUL})" if "\0" in self._text else ""
            lines = self._text.count("\n", self._at, error.pos)
            start = self._text.rfind("\n", self._at, error.pos) + 1 if lines else self._line_start
            where = f"{self._file.path}:{self._line + lines}:{error.pos - start + 1}"
            raise DataError(f"{where}: not JSON: {error.msg}: {excerpt(self._text, error.pos)}{hint}") from error
        except RecursionError as error:
            raise DataError(f"{self._file.path}: nested too deeply to be read") from error

    @property
    def line(self) -> int:
        return self._line

    def next(self) -> str:
        """Return the next non-blank character without consuming it; "" at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            assert blanks
            self._go_to(blanks.end())
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self, allowed: str, message: str) -> str:
        """Consume and return the next non-blank character, which must be in `allowed`."""
        char = self.next()
        if not char or char not in allowed:
            raise self.fault(message)
        self._go_to(self._at + 1)
        return char

    def fault(self, message: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self._text, self._at)

    def value(self, decoder: json.JSONDecoder) -> Any:
        """Consume and return the value here. Raises JSONDecodeError, or what the decoder's hooks raise."""
        while len(self._text) - self._at <= SMALL:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if not self._more():
                    raise
                continue
            if end < len(self._text) or not self._more():  # otherwise a number may be incomplete
                self._go_to(end)
                return value
        end = self._end_of_value()
        if takes_too_much(self._text[self._at : end]):
            raise self._too_large()
        value, end = decoder.raw_decode(self._text, self._at)
        self._go_to(end)
        return value

    def _end_of_value(self) -> int:
        """Find the end of a long value without building it in memory."""
        depth, at = 0, self._at
        while True:
            for part in _PART.finditer(self._text, at):
                if part[1] == "":
                    at = part.start()
                    break
                char = part[0][0]
                depth += (char in "[{") - (char in "]}")
                at = part.end()
                if depth <= 0:
                    return at
            length, before = len(self._text) - self._at, self._at
            if length > MAX_LINE:
                raise self._too_large()
            if not self._more(min(length, MAX_LINE + 1 - length)):
                return len(self._text)
            at -= before - self._at

    def _too_large(self) -> DataError:
        return DataError(
            f"{self._file.path}:{self._line}: an element of more than {MAX_LINE >> 20} MiB, or of too many small "
            "parts; split it"
        )

    def _go_to(self, at: int) -> None:
        if lines := self._text.count("\n", self._at, at):
            self._line += lines
            self._line_start = self._text.rfind("\n", self._at, at) + 1
        self._at = at

    def _more(self, num_bytes: int = 0) -> bool:
        """Read more text and drop the text before the position. Returns False at the end of the file."""
        if self._at_end:
            return False
        data = self._file.stream.read(max(CHUNK, num_bytes))
        self._at_end = not data
        data = self._undecoded + data
        try:
            text, used = codecs.utf_8_decode(data, "strict", self._at_end)
        except UnicodeDecodeError as error:
            line, column = self._position_of_byte(data, error.start)
            raise DataError(f"{self._file.path}:{line}: not UTF-8 at byte {column} of the line") from error
        line, column = self._position_of_byte(data, used)
        self._read_lines, self._read_bytes = line - 1, column - 1
        self._undecoded = data[used:]
        start = max(0, self._at - SHOWN)
        self._text, self._at, self._line_start = (
            self._text[start:] + text,
            self._at - start,
            self._line_start - start,
        )
        return True

    def _position_of_byte(self, data: bytes, at: int) -> tuple[int, int]:
        """Return the line and the byte in the line, both from 1."""
        newline = data.rfind(b"\n", 0, at)
        line = 1 + self._read_lines + data.count(b"\n", 0, at)
        return line, at - newline if newline >= 0 else self._read_bytes + at + 1


def _list(text: _Window) -> Rows:
    """Yield the elements of the array here, each with the number of its first line."""
    text.take("[", "an array is needed")
    more = text.next() != "]" or text.take("]", "") == ","
    while more:
        text.next()
        yield _element(text)
        more = text.take(",]", "Expecting ',' or ']'") == ","


def _element(text: _Window) -> RawRow | BadRow:
    line = text.line
    try:
        value = text.value(DECODER)
    except json.JSONDecodeError:
        raise
    except (RowError, ValueError) as reason:  # also what Python refuses, such as a number with thousands of digits
        text.value(SKIMMER)
        return BadRow(text.name, line, str(reason))
    try:
        return RawRow(text.name, line, checked(value))
    except RowError as reason:
        return BadRow(text.name, line, str(reason))


def _keys_and_lists(text: _Window) -> tuple[list[str], dict[str, int]]:
    """Return the keys of the object here, and the positions of those that hold a list of objects."""
    keys: list[str] = []
    lists: dict[str, int] = {}
    for number, key in enumerate(_keys(text)):
        keys.append(printable(key[:40]))
        if _skip(text):
            lists[printable(key)] = number
    return keys, lists


def _keys(text: _Window) -> Generator[str]:
    """Yield the keys of the object here. The caller must consume each value before the next key."""
    text.take("{", "an object is needed")
    more = text.next() != "}" or text.take("}", "") == ","
    while more:
        if text.next() != '"':
            raise text.fault("Expecting property name enclosed in double quotes")
        key: str = text.value(SKIMMER)
        text.take(":", "Expecting ':' delimiter")
        yield key
        more = text.take(",}", "Expecting ',' delimiter") == ","


def _skip(text: _Window) -> bool:
    """Consume the value here; return whether it is a list of objects."""
    if text.next() != "[":
        text.value(SKIMMER)
        return False
    text.take("[", "")
    more = are_objects = text.next() != "]" or text.take("]", "") == ","
    while more:
        are_objects = text.next() == "{" and are_objects
        text.value(SKIMMER)
        more = text.take(",]", "Expecting ',' or ']'") == ","
    return are_objects
