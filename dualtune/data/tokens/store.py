"""Tokenized rows in flat files that are read on demand, so that a million documents need little memory.

`tokens.bin` contains the documents' tokens in sequence as int32: the id of a target, and ~id of any other token.
`index.bin` contains an entry of INDEX for each document and for each dropped row. `weights.bin` exists only if a
document has loss weights: the float32 weight of each token in `tokens.bin`, 0 for tokens that are not targets and for
all tokens of a document without weights (a hole in the file, which needs no disk space).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from dualtune.base.errors import DataError, DiskError
from dualtune.base.files import cache_dir, hidden_sibling, json_bytes, remove_directory
from dualtune.base.versions import versions_of
from dualtune.data.sources.rows import BadRows
from dualtune.data.tokens.tokenize import TokenizedRow, Tokens

TOKENS, INDEX_FILE, WEIGHTS = "tokens.bin", "index.bin", "weights.bin"
INDEX = np.dtype(
    [
        ("start", "<i8"),  # of its tokens in tokens.bin
        ("length", "<i4"),  # 0: a dropped row
        ("num_targets", "<i4"),
        ("row", "<i8"),  # number of the example in its source
        ("row_length", "<i4"),  # tokens of the row before truncation
        ("file", "<i4"),  # number of the file in the source
        ("line", "<i8"),
        ("state", "<i4"),
        ("control", "<i4"),  # 1: the row's content contains a control token
        ("label", "<i4"),  # 1: a desirable answer, -1: an undesirable one, 0: neither
        ("beginning", "<i4"),  # tokens without a target at its beginning that the row's first document begins with, too
        ("digest", "V16"),  # BLAKE2b of the stored tokens, and of the weights if there are any
    ]
)


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens of a document, and which of them are targets."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]: this token is a target
    where: str = ""  # path:line of the row
    has_control_text: bool = False  # the row's content contains a control token
    weights: np.ndarray | None = None  # float32 [T], 0 where the token is not a target; None: 1 for all targets

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.loss_mask[1:]))  # nothing precedes the first token, so it cannot be predicted


class HiddenStates(Protocol):
    """Hidden states of documents, [T, D], that need not be computed again."""

    def __getitem__(self, document: int, /) -> np.ndarray: ...


class TokenFile:
    """Four bytes per token, int32 by default, read on demand. (Mapped pages would count as memory once used.)"""

    def __init__(self, path: Path, dtype: str = "<i4") -> None:
        self._dtype = dtype
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, cut: slice, /) -> np.ndarray:
        return np.frombuffer(os.pread(self._descriptor, 4 * (cut.stop - cut.start), 4 * cut.start), self._dtype)


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The tokenized rows of one source."""

    tokens: np.ndarray | TokenFile  # int32, all documents
    index: np.ndarray  # INDEX [documents and dropped rows]
    files: tuple[str, ...]
    num_rows: int  # examples
    answers: int  # documents of each row that is compared: 2 for a preference; 1: rows are not compared
    num_bad: int  # bad rows, which were skipped
    bad: tuple[str, ...]  # the first bad rows, with their reasons
    path: Path | None = None  # None: in memory
    weights: np.ndarray | TokenFile | None = None  # float32, one per token; None: no document has weights
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])  # duplicates that are not here: kind -> rows
    notices: Mapping[str, int] = field(default_factory=dict[str, int])  # kind of `row_values.py`, `masks.py` -> rows

    def tokens_of_rows(self) -> np.ndarray:
        """Return int64 [num_rows]: the number of tokens in the documents of each row; 0 for a dropped row."""
        return np.bincount(self.index["row"], self.index["length"], self.num_rows).astype(np.int64)

    def document(self, i: int) -> Document:
        """Read a document. Raises DataError if it differs from what was written."""
        entry = self.index[i]
        cut = slice(int(entry["start"]), int(entry["start"]) + int(entry["length"]))
        raw, weights = self.tokens[cut], None if self.weights is None else self.weights[cut]
        weights = weights if weights is not None and weights.any() else None
        if _digest(raw, weights) != entry["digest"].tobytes():
            raise DataError(f"{self.path}: the cache of tokenized data is damaged. Remove this directory and run again")
        where = f"{self.files[entry['file']]}:{entry['line']}"
        return Document(np.where(raw < 0, ~raw, raw), raw >= 0, where, bool(entry["control"]), weights)


class Writer:
    """Writes a store row by row; `table()` returns the metadata to save beside the files.

    `open_weights` is called for the first document with weights.
    """

    def __init__(self, tokens: BinaryIO, index: BinaryIO, open_weights: Callable[[], BinaryIO]) -> None:
        self._tokens, self._index = tokens, index
        self._open_weights = open_weights
        self.weights: BinaryIO | None = None
        self._start = 0
        self._files: dict[str, int] = {}
        self.num_rows = 0
        self.answers = 1
        self.left_out: Counter[str] = Counter()  # duplicates that were not added: kind -> rows
        self.notices: Counter[str] = Counter()

    def add(self, row: TokenizedRow) -> None:
        """Append a row. Raises DiskError if it cannot be written."""
        self.num_rows = row.number + 1
        self.answers = max(self.answers, row.answers)
        self.notices.update(row.notices)
        entries = np.zeros(max(1, len(row.documents)), INDEX)
        entries["row"], entries["line"], entries["state"] = row.number, row.line, row.state
        # A pair has a length for each document; else all documents are of one text.
        paired = len(row.lengths) == len(entries)
        entries["row_length"] = row.lengths if paired else max(row.lengths)
        entries["control"] = row.control_token is not None
        entries["label"] = row.label
        entries["file"] = self._files.setdefault(row.path, len(self._files))
        try:
            for entry, (tokens, mask) in zip(entries, row.documents, strict=False):
                raw = np.where(mask, tokens, ~tokens).astype("<i4")
                weights = None if mask.dtype == bool else mask.astype("<f4")
                entry["start"], entry["length"] = self._start, len(raw)
                entry["num_targets"] = np.count_nonzero(mask[1:])
                entry["beginning"] = 0 if row.answers == 1 else common_beginning(row.documents[0], (tokens, mask))
                entry["digest"] = np.void(_digest(raw, weights))
                self._tokens.write(raw.tobytes())
                if weights is not None:
                    self.weights = self.weights or self._open_weights()
                    self.weights.seek(4 * self._start)  # tokens without weights before it leave a hole
                    self.weights.write(weights.tobytes())
                self._start += len(raw)
            self._index.write(entries.tobytes())
        except OSError as error:
            raise DiskError(f"the cache of tokenized data cannot be written: {error.strerror or error}") from error

    def finish(self) -> None:
        """Extend the weights to the number of tokens. The caller closes the files."""
        if self.weights is not None:
            self.weights.truncate(4 * self._start)

    def table(self) -> dict[str, Any]:
        counts = {"left_out": self.left_out, "notices": self.notices}
        return {"files": list(self._files), "num_rows": self.num_rows, "answers": self.answers, **counts}


def common_beginning(first: Tokens, other: Tokens) -> int:
    """Return how many tokens can be computed once for both documents; 0 for one and the same document.

    These tokens are equal and predict no target. The last one before the documents differ predicts another token in
    each, so it is not among them.
    """
    if other[0] is first[0]:
        return 0
    length = min(len(first[0]), len(other[0]))
    differs_T = first[0][:length] != other[0][:length]
    ends_T = differs_T | (first[1][:length] != 0) | (other[1][:length] != 0)
    ends_T[0] = differs_T[0]  # nothing precedes the first token, so it is not a target
    return max(0, (int(ends_T.argmax()) if ends_T.any() else length) - 1)


def stored_in_memory(rows: list[TokenizedRow]) -> TokenStore:
    """Return a store like that of a file, without one."""
    tokens, index, weights = BytesIO(), BytesIO(), BytesIO()
    writer = Writer(tokens, index, lambda: weights)
    for row in rows:
        writer.add(row)
    files = tuple(writer.table()["files"])
    flat, entries = np.frombuffer(tokens.getvalue(), "<i4"), np.frombuffer(index.getvalue(), INDEX)
    weighed = None
    if writer.weights is not None:
        weighed = np.frombuffer(weights.getvalue().ljust(flat.nbytes, b"\0"), "<f4")
    return TokenStore(
        flat, entries, files, writer.num_rows, writer.answers, 0, (), weights=weighed, notices=writer.notices
    )


def _digest(raw: np.ndarray, weights: np.ndarray | None) -> bytes:
    weighed = b"" if weights is None else weights.tobytes()
    return hashlib.blake2b(raw.tobytes() + weighed, digest_size=16).digest()


# ----------------------------------------------------------------------------------------------------------------------
# The cache of tokenized data: one store for each (content of the files, tokenizer, template, settings).
#
# It is in $DUALTUNE_CACHE, or $XDG_CACHE_HOME/dualtune, or ~/.cache/dualtune. Stores are written atomically. Creating a
# store removes those that have not been used for thirty days.

TABLE = "store.json"
KEPT_DAYS = 30

Build = Callable[[Writer, BadRows], None]


def open_store(key: Mapping[str, Any], build: Build) -> TokenStore:
    """Return the store of this key from the cache, or create it with `build(writer, bad_rows)` and cache it.

    If the cache cannot be written, the store lasts until the process ends. Raises DiskError without any disk space.
    """
    parts = {**key, "versions": versions_of(("tokenizers", "jinja2", "numpy")), "code": _code()}
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    directory = cache_dir() / "data" / name
    if cached := _read(directory):
        with contextlib.suppress(OSError):
            os.utime(directory)  # marks it as used now
        return cached
    # Two processes may make the same store: each writes its own, and the first to rename it wins.
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = hidden_sibling(directory)
        temporary.mkdir()
    except OSError:  # the cache cannot be written: the store lasts as long as the process
        directory = Path(tempfile.mkdtemp(dir=_scratch().name))
        _write(directory, build)
        store = _read(directory)
        assert store is not None
        return store
    try:
        _write(temporary, build)
        forget_unused(directory.parent)
        with contextlib.suppress(OSError, DiskError):  # another process was faster
            if directory.exists() and _read(directory) is None:  # damaged
                remove_directory(directory)
            temporary.rename(directory)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
    store = _read(directory)
    if store is None:
        raise DiskError(
            f"{directory}: the tokenized data was written, but is not there. Set DUALTUNE_CACHE to another directory"
        )
    return store


@functools.cache
def _code() -> str:
    """Return a hash of the source of `dualtune.data`, which converts rows to tokens."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(directory: Path, build: Build) -> None:
    bad = BadRows()
    try:
        with contextlib.ExitStack() as files:

            def open_file(name: str) -> BinaryIO:
                return files.enter_context((directory / name).open("xb"))

            tokens, index = open_file(TOKENS), open_file(INDEX_FILE)
            writer = Writer(tokens, index, lambda: open_file(WEIGHTS))
            build(writer, bad)
            writer.finish()
            for file in (tokens, index, *([writer.weights] if writer.weights else [])):
                file.flush()
                os.fsync(file.fileno())
        names = [TOKENS, INDEX_FILE] + [WEIGHTS] * (writer.weights is not None)
        sizes = {name: (directory / name).stat().st_size for name in names}
        table = {**writer.table(), "num_bad": bad.count, "bad": bad.first, "bytes": sizes}
        (directory / TABLE).write_bytes(json_bytes(table))
    except OSError as error:
        raise DiskError(
            f"{directory.parent}: the tokenized data cannot be written: {error.strerror or error}. "
            "Free disk space, or set DUALTUNE_CACHE to a directory on another disk"
        ) from error


def _read(directory: Path) -> TokenStore | None:
    """Read the store at this path; None if there is no complete one."""
    try:
        table = json.loads((directory / TABLE).read_text(encoding="utf-8"))
        if any((directory / name).stat().st_size != size for name, size in table["bytes"].items()):
            return None
        file = directory / INDEX_FILE
        index = np.memmap(file, INDEX, mode="r") if file.stat().st_size else np.zeros(0, INDEX)  # cannot map 0 bytes
        counts = (table["num_rows"], table["answers"], table["num_bad"], tuple(table["bad"]))
        weights = TokenFile(directory / WEIGHTS, "<f4") if WEIGHTS in table["bytes"] else None
        left_out, notices = table.get("left_out", {}), table.get("notices", {})  # an older dualtune counted neither
        files, tokens = tuple(table["files"]), TokenFile(directory / TOKENS)
        return TokenStore(tokens, index, files, *counts, directory, weights, left_out, notices)
    except (OSError, ValueError, KeyError):
        return None


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dualtune-")  # removed when the process ends


def forget_unused(directory: Path) -> None:
    """Remove stores that have not been used for long, and leftovers of killed processes."""
    oldest = time.time() - KEPT_DAYS * 86_400
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
