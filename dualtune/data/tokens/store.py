"""Tokenized rows in flat files that are read piece by piece: a million documents take little memory.

`tokens.bin` holds the documents' tokens one after the other as int32: the id of a token that is learned, and ~id of one
that is not. `index.bin` holds an entry of INDEX for each document, and one for each dropped row. `weights.bin` is there
only where a document has weights: the float32 of each token of `tokens.bin`, 0 for all of a document without (a hole in
the file, which takes no room) and for what is not learned.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dualtune.data.tokens.tokenize import TokenizedRow
from dualtune.errors import DataError, DiskError

TOKENS, INDEX_FILE, WEIGHTS = "tokens.bin", "index.bin", "weights.bin"
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
        ("digest", "V16"),  # BLAKE2b of the tokens as they are stored, and of the weights where there are some
    ]
)


@dataclass(frozen=True, slots=True)
class Document:
    tokens: np.ndarray  # int32 [T]
    trained: np.ndarray  # bool [T]: this token is a target
    where: str = ""  # path:line of the row
    has_control_text: bool = False  # the row's own text holds a control token
    weights: np.ndarray | None = None  # float32 [T], 0 where nothing is learned; None: 1 wherever something is

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.trained[1:]))  # nothing precedes the first token, so it cannot be predicted


class TokenFile:
    """Four bytes for each token, int32 by default, read when they are asked for. (Mapped, they would count as memory
    once used.)"""

    def __init__(self, path: Path, dtype: str = "<i4") -> None:
        self._dtype = dtype
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, cut: slice, /) -> np.ndarray:
        return np.frombuffer(os.pread(self._descriptor, 4 * (cut.stop - cut.start), 4 * cut.start), self._dtype)


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
    weights: np.ndarray | TokenFile | None = None  # float32, as many as tokens; None: no document has some

    def tokens_of_rows(self) -> np.ndarray:
        """int64 [num_rows]: how many tokens of each row are in its documents; a dropped row has none."""
        return np.bincount(self.index["row"], self.index["length"], self.num_rows).astype(np.int64)

    def document(self, i: int) -> Document:
        """DataError if it is not what was written."""
        entry = self.index[i]
        cut = slice(int(entry["start"]), int(entry["start"]) + int(entry["length"]))
        raw, weights = self.tokens[cut], None if self.weights is None else self.weights[cut]
        weights = weights if weights is not None and weights.any() else None
        if _digest(raw, weights) != entry["digest"].tobytes():
            raise DataError(f"{self.path}: the cache of tokenized data is damaged. Remove this directory and run again")
        where = f"{self.files[entry['file']]}:{entry['line']}"
        return Document(np.where(raw < 0, ~raw, raw), raw >= 0, where, bool(entry["control"]), weights)


class Writer:
    """Writes a store row by row; `table()` is what belongs beside the files.

    `open_weights` is called when the first document with weights comes.
    """

    def __init__(self, tokens: BinaryIO, index: BinaryIO, open_weights: Callable[[], BinaryIO]) -> None:
        self._tokens, self._index = tokens, index
        self._open_weights = open_weights
        self.weights: BinaryIO | None = None
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
                weights = None if trained.dtype == bool else trained.astype("<f4")
                entry["start"], entry["length"] = self._start, len(raw)
                entry["num_targets"] = np.count_nonzero(trained[1:])
                entry["digest"] = np.void(_digest(raw, weights))
                self._tokens.write(raw.tobytes())
                if weights is not None:
                    self._write_weights(weights)
                self._start += len(raw)
            self._index.write(entries.tobytes())
        except OSError as error:
            raise DiskError(f"the cache of tokenized data cannot be written: {error.strerror or error}") from error

    def finish(self) -> None:
        """Make the weights as long as the tokens. The files are the caller's to close."""
        if self.weights is not None:
            self.weights.truncate(4 * self._start)

    def _write_weights(self, weights: np.ndarray) -> None:
        if self.weights is None:
            self.weights = self._open_weights()
        self.weights.seek(4 * self._start)
        self.weights.write(weights.tobytes())

    def table(self) -> dict[str, Any]:
        return {"files": list(self._files), "num_rows": self.num_rows}


def stored_in_memory(rows: list[TokenizedRow]) -> Store:
    tokens, index, weights = BytesIO(), BytesIO(), BytesIO()
    writer = Writer(tokens, index, lambda: weights)
    for row in rows:
        writer.add(row)
    files = tuple(writer.table()["files"])
    flat, entries = np.frombuffer(tokens.getvalue(), "<i4"), np.frombuffer(index.getvalue(), INDEX)
    weighed = None
    if writer.weights is not None:
        weighed = np.frombuffer(weights.getvalue().ljust(flat.nbytes, b"\0"), "<f4")
    return Store(flat, entries, files, writer.num_rows, 0, (), weights=weighed)


def _digest(raw: np.ndarray, weights: np.ndarray | None) -> bytes:
    weighed = b"" if weights is None else weights.tobytes()
    return hashlib.blake2b(raw.tobytes() + weighed, digest_size=16).digest()
