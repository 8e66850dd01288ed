"""An open data file: decompressed bytes, lines of bounded length, and progress."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import itertools
import os
import stat
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from dualtune.base.errors import DataError
from dualtune.data.sources.rows import BadRow, RawRow

MAX_LINE = 3 << 20  # bytes: almost a million tokens; reading one can need sixteen times as much memory
LINE_TOO_LONG = f"line of more than {MAX_LINE >> 20} MiB; split it, or put long texts into a .txt file"
MAX_RATIO = 250  # the largest allowed compression ratio; that of real text is 3 to 10…
FREE_BYTES = 64 << 20  # …checked from this size on
HOLDS_NUL = "holds NUL bytes: the file was probably truncated by a crash"
OTHER_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),  # before UTF-16: the marks start with the same bytes
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)

Rows = Iterator[RawRow | BadRow]


@dataclass(slots=True)
class DataFile:
    """The input of a reader. The reader sets `done` if the file position does not show its progress."""

    path: Path
    stream: BinaryIO  # decompressed, after a byte order mark
    raw: BinaryIO  # the bytes on disk
    size: int
    done: float | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def share(self) -> float:
        """Return the fraction of the file that has been read, in [0, 1]."""
        return self.raw.tell() / max(1, self.size) if self.done is None else self.done

    def rewind(self) -> None:
        """Seek to the first byte after the byte order mark."""
        self.stream.seek(0)
        _skip_byte_order_mark(self.path, self.stream)

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield the number and bytes of each line; None for a line that is too long. Only a newline ends a line."""
        for number in itertools.count(1):
            line = self.stream.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE and not line.endswith(b"\n"):
                line = None
                while (piece := self.stream.readline(1 << 20)) and not piece.endswith(b"\n"):
                    pass
            yield number, line


@contextlib.contextmanager
def reading(path: Path) -> Generator[None]:
    """Convert errors of reading a file to DataError."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: broken gzip file ({error}); create or download it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Expanded(gzip.GzipFile):
    """Decompressed bytes. Raises DataError for a compression ratio that only a decompression bomb has."""

    unchecked = 0  # bytes

    def read(self, size: int | None = -1) -> bytes:
        return self._counted(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._counted(super().readline(size))

    def _counted(self, data: bytes) -> bytes:
        self.unchecked += len(data)
        if self.unchecked > 1 << 20:
            self.unchecked = 0
            if self.tell() > max(FREE_BYTES, MAX_RATIO * cast(BinaryIO, self.fileobj).tell()):
                raise DataError(
                    f"{self.name}: expands to more than {MAX_RATIO} times its size, as a decompression bomb does. "
                    "If you trust it, decompress it first: gunzip"
                )
        return data


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without blocking. Raises DataError for a pipe or a device, which may never end."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DataError(f"{path}: is not a regular file; write the data to a file first")
    return file


@contextlib.contextmanager
def opened(path: Path) -> Generator[DataFile]:
    """Open a text or table file. Raises DataError if opening or reading it fails."""
    with reading(path), contextlib.ExitStack() as stack:
        raw = stack.enter_context(open_regular(path))
        compressed = path.suffix.lower() == ".gz"
        stream = stack.enter_context(_Expanded(str(path), "rb", fileobj=raw)) if compressed else raw
        _skip_byte_order_mark(path, stream)
        yield DataFile(path, cast(BinaryIO, stream), raw, os.fstat(raw.fileno()).st_size)


def _skip_byte_order_mark(path: Path, stream: gzip.GzipFile | BinaryIO) -> None:
    head = cast(gzip.GzipFile, stream).peek(4)[:4]
    encoding = next((name for mark, name in OTHER_ENCODINGS if head.startswith(mark)), None)
    if len(head) == 4 and encoding is None:  # UTF-16 without a mark: every second byte of ASCII is zero
        encoding = {"1010": "UTF-16LE", "0101": "UTF-16BE"}.get("".join("1" if byte else "0" for byte in head))
    if encoding:
        raise DataError(
            f"{path}: got {encoding}, UTF-8 is needed. "
            f"Convert it: iconv -f {encoding} -t UTF-8 '{path.name}' > new.file"
        )
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
