"""Numbers in the header of a GGUF file: a converter does not name every token that ends a turn.

The layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from dualtune.errors import FormatError

_MAGIC, _VERSION, _UINT32, _STRING, _ARRAY = b"GGUF", 3, 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
_ALIGNMENT, _ALIGNMENT_KEY = 32, b"general.alignment"
_MOST = 1 << 30  # bytes of a text or an array, beyond which the file is damaged


def set_numbers(file: Path, numbers: Mapping[str, int]) -> None:
    """Set uint32 keys in the header of a GGUF file, which is written anew. FormatError if it is none of version 3."""
    new = {key.encode(): struct.pack("<I", value) for key, value in numbers.items()}
    patched = file.with_name(f"{file.name}.patched")
    with file.open("rb") as source, patched.open("xb") as target:
        header = _Header(source, file)
        tensors, count = header.number("Q"), header.number("Q")
        entries = [header.entry() for _ in range(count)]
        alignment = next(
            (struct.unpack("<I", raw[-4:])[0] for key, raw in entries if key == _ALIGNMENT_KEY), _ALIGNMENT
        )
        begin = source.tell()
        for _ in range(tensors):
            header.tensor()
        infos = header.since(begin)
        kept = [raw for key, raw in entries if key not in new]
        added = [_text(key) + struct.pack("<I", _UINT32) + value for key, value in new.items()]
        head = (
            _MAGIC + struct.pack("<IQQ", _VERSION, tensors, len(kept) + len(added)) + b"".join([*kept, *added]) + infos
        )
        target.write(head + bytes(-len(head) % alignment))
        source.seek(source.tell() + -source.tell() % alignment)
        shutil.copyfileobj(source, target, 1 << 20)
    patched.replace(file)


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


class _Header:
    """Reads what stands before the tensors of a GGUF file, entry by entry."""

    def __init__(self, source: BinaryIO, file: Path) -> None:
        self._source, self._file = source, file
        if self._bytes(4) != _MAGIC or self.number("I") != _VERSION:
            raise FormatError(f"{file}: is no GGUF file of version {_VERSION}")

    def number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self._bytes(struct.calcsize(form)))[0])

    def entry(self) -> tuple[bytes, bytes]:
        """Return a key, and all bytes of its entry."""
        begin = self._source.tell()
        key = self._bytes(self.number("Q"))
        self._skip(self.number("I"))
        return key, self.since(begin)

    def tensor(self) -> None:
        """Read the description of one tensor: name, dimensions, type, offset."""
        self._bytes(self.number("Q"))
        self._bytes(8 * self.number("I") + 4 + 8)

    def since(self, begin: int) -> bytes:
        """Return the bytes from there to the present place."""
        end = self._source.tell()
        self._source.seek(begin)
        return self._bytes(end - begin)

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._bytes(self.number("Q"))
        elif kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in _SIZES:
                self._bytes(_SIZES[inner] * count)
            else:
                for _ in range(count):
                    self._skip(inner)
        elif kind in _SIZES:
            self._bytes(_SIZES[kind])
        else:
            raise FormatError(f"{self._file}: its header has a value of type {kind}, which GGUF does not know")

    def _bytes(self, count: int) -> bytes:
        content = self._source.read(count) if count <= _MOST else b""
        if len(content) != count:
            raise FormatError(f"{self._file}: its header ends early. Export again")
        return content
