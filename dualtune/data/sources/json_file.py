"""Read the rows of a .json file one element at a time; only one element is held in memory."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Generator
from typing import Any

from dualtune.data.sources.data_file import HOLDS_NUL, MAX_LINE, DataFile, Rows
from dualtune.data.sources.json_rows import DECODER, SKIMMER, SMALL, checked, excerpt, read_jsonl, takes_too_much
from dualtune.data.sources.rows import BadRow, RawRow, RowError, printable
from dualtune.errors import DataError

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
            yield from _elements(text)
            return
        keys, lists = _keys_and_lists(text)
        is_one_object = not text.next()
    file.rewind()
    if not is_one_object:
        yield from read_jsonl(file)
        return
    if len(lists) != 1:
        shown, found = (", ".join(names[:10]) + (", …" if len(names) > 10 else "") for names in (keys, [*lists]))
        raise DataError(
            f"{file.path}: got one object with the keys {shown or '(none)'}; an array of objects is needed, "
            f"or an object with exactly one list of objects in it (here: {found or 'none'})"
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
            held, before = len(self._text) - self._at, self._at
            if held > MAX_LINE:
                raise self._too_large()
            if not self._more(min(held, MAX_LINE + 1 - held)):
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
        kept_from = max(0, self._at - SHOWN)
        self._text, self._at, self._line_start = (
            self._text[kept_from:] + text,
            self._at - kept_from,
            self._line_start - kept_from,
        )
        return True

    def _position_of_byte(self, data: bytes, at: int) -> tuple[int, int]:
        """Return the line and the byte in the line, both from 1."""
        newline = data.rfind(b"\n", 0, at)
        line = 1 + self._read_lines + data.count(b"\n", 0, at)
        return line, at - newline if newline >= 0 else self._read_bytes + at + 1


def _elements(text: _Window) -> Rows:
    """Yield the elements of the array that is the whole file."""
    if text.next() != "[":
        raise text.fault("an array of objects is needed")
    yield from _list(text)
    if text.next():
        raise text.fault("Extra data after the array")


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
