"""Tokenized rows in two flat files that are read piece by piece: a million documents take little memory.

`tokens.bin` holds the documents' tokens one after the other as int32: the id of a token that is learned, and ~id of one
that is not. `index.bin` holds an entry of INDEX for each document, and one for each dropped row.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dualtune.data.tokenize import TokenizedRow
from dualtune.errors import DataError, DiskError

TOKENS, INDEX_FILE = "tokens.bin", "index.bin"
INDEX = np.dtype(
    [
        ("start", "<i8"),  # of its tokens
        ("length", "<i4"),  # 0: a dropped row
        ("num_targets", "<i4"),
        ("row", "<i8"),  # number of the example in its source
        ("row_length", "<i4"),  # tokens of the row before anything was cut
        ("file", "<i4"),  # number of the file in the source
        ("line", "<i8"),
        ("state", "<i4"),
        ("control", "<i4"),  # 1: the row's own text holds a control token
        ("digest", "V16"),  # BLAKE2b of the tokens as they are stored
    ]
)


@dataclass(frozen=True, slots=True)
class Document:
    tokens: np.ndarray  # int32 [T]
    trained: np.ndarray  # bool [T]: this token is a target
    where: str = ""  # path:line of the row
    has_control_text: bool = False  # the row's own text holds a control token

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.trained[1:]))  # nothing precedes the first token, so it cannot be predicted


class TokenFile:
    """The tokens of a file, int32, read when they are asked for. (Mapped, they would count as memory once used.)"""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, cut: slice, /) -> np.ndarray:
        return np.frombuffer(os.pread(self._descriptor, 4 * (cut.stop - cut.start), 4 * cut.start), "<i4")


@dataclass(frozen=True, slots=True)
class Store:
    """The tokenized rows of one source."""

    tokens: np.ndarray | TokenFile  # int32, all documents
    index: np.ndarray  # INDEX [documents and dropped rows]
    files: tuple[str, ...]
    num_rows: int  # examples
    num_bad: int  # rows that are no example, left out
    bad: tuple[str, ...]  # the first of them, with their reasons
    path: Path | None = None  # None: in memory

    def tokens_of_rows(self) -> np.ndarray:
        """int64 [num_rows]: how many tokens of each row are in its documents; a dropped row has none."""
        return np.bincount(self.index["row"], self.index["length"], self.num_rows).astype(np.int64)

    def document(self, i: int) -> Document:
        """DataError if it is not what was written."""
        entry = self.index[i]
        start = int(entry["start"])
        raw = self.tokens[start : start + int(entry["length"])]
        if _digest(raw) != entry["digest"].tobytes():
            raise DataError(f"{self.path}: the cache of tokenized data is damaged. Remove this directory and run again")
        where = f"{self.files[entry['file']]}:{entry['line']}"
        return Document(np.where(raw < 0, ~raw, raw), raw >= 0, where, bool(entry["control"]))


class Writer:
    """Writes a store row by row; `table()` is what belongs beside the two files."""

    def __init__(self, tokens: BinaryIO, index: BinaryIO) -> None:
        self._tokens, self._index = tokens, index
        self._start = 0
        self._files: dict[str, int] = {}
        self.num_rows = 0

    def add(self, row: TokenizedRow) -> None:
        """DiskError if it cannot be written."""
        self.num_rows = row.number + 1
        entries = np.zeros(max(1, len(row.documents)), INDEX)
        entries["row"], entries["line"], entries["state"] = row.number, row.line, row.state
        entries["row_length"], entries["control"] = row.num_tokens, row.control_token is not None
        entries["file"] = self._files.setdefault(row.path, len(self._files))
        try:
            for entry, (tokens, trained) in zip(entries, row.documents, strict=False):
                raw = np.where(trained, tokens, ~tokens).astype("<i4")
                entry["start"], entry["length"], self._start = self._start, len(raw), self._start + len(raw)
                entry["num_targets"] = np.count_nonzero(trained[1:])
                entry["digest"] = np.void(_digest(raw))
                self._tokens.write(raw.tobytes())
            self._index.write(entries.tobytes())
        except OSError as error:
            raise DiskError(f"the cache of tokenized data cannot be written: {error.strerror or error}") from error

    def table(self) -> dict[str, Any]:
        return {"files": list(self._files), "num_rows": self.num_rows}


def stored_in_memory(rows: list[TokenizedRow]) -> Store:
    tokens, index = BytesIO(), BytesIO()
    writer = Writer(tokens, index)
    for row in rows:
        writer.add(row)
    files = tuple(writer.table()["files"])
    flat, entries = np.frombuffer(tokens.getvalue(), "<i4"), np.frombuffer(index.getvalue(), INDEX)
    return Store(flat, entries, files, writer.num_rows, 0, ())


def _digest(raw: np.ndarray) -> bytes:
    return hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
