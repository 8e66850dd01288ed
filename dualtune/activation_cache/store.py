"""The file of hidden states: those of one document after another, in the order of the documents.

`hidden.bin` holds the numbers of each document, [T, D], in the dtype in which they were computed. `crc32.bin` has the
checksum of each document. Both are read on demand, not mapped, like tokens (decision 0011). A store is written whole or
not at all; a damaged one is made again, or is an error once the run uses it. Creating one removes those that have not
been used for thirty days.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dualtune.adapter.frozen_layers import KEY
from dualtune.data.tokens.cache import forget_unused
from dualtune.errors import DataError, DiskError
from dualtune.io.disk import cache_dir, existing, json_bytes, new_directory, remove_directory
from dualtune.text.show import in_bytes

STATES, CHECKSUMS, TABLE = "hidden.bin", "crc32.bin", "store.json"

Computed = Iterable[tuple[int, np.ndarray]]  # document and its hidden states [T, D], in any order


@dataclass(frozen=True, slots=True)
class StatesShape:
    """What the hidden states of all documents look like."""

    lengths: np.ndarray  # int64 [documents]: tokens
    width: int  # D
    dtype: np.dtype[Any]

    @property
    def starts(self) -> np.ndarray:
        """The byte at which each document begins, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths)]) * self.width * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return int(self.starts[-1])


class StoredStates:
    """The hidden states of documents, in a file."""

    def __init__(self, path: Path, shape: StatesShape, checksums: np.ndarray) -> None:
        self.path = path
        self.shape, self._starts, self._checksums = shape, shape.starts, checksums
        self._descriptor = os.open(path / STATES, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __str__(self) -> str:
        return f"hidden states of {len(self.shape.lengths)} documents, {in_bytes(self.shape.num_bytes)}, in {self.path}"

    def __getitem__(self, document: int) -> np.ndarray:
        """Read those of a document, [T, D]. Raises DataError if they differ from what was written."""
        start, end = (int(at) for at in self._starts[document : document + 2])
        raw = os.pread(self._descriptor, end - start, start)
        if len(raw) != end - start or zlib.crc32(raw) != self._checksums[document]:
            raise DataError(
                f"{self.path}: the cache of hidden states is damaged. Remove this directory and run again: they are "
                f"computed again, to the same bits. Without a cache: {KEY}=none"
            )
        return np.frombuffer(raw, self.shape.dtype).reshape(-1, self.shape.width)


def directory_of(key: Mapping[str, Any]) -> Path:
    """Return where the store of this key is, or would be."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / "activations" / name


def read_store(directory: Path, shape: StatesShape) -> StoredStates | None:
    """Return the store in this directory; None if there is no complete one of this shape."""
    try:
        table = json.loads((directory / TABLE).read_text(encoding="utf-8"))
        sizes = {name: (directory / name).stat().st_size for name in (STATES, CHECKSUMS)}
        checksums = np.frombuffer((directory / CHECKSUMS).read_bytes(), "<u4")
        if table != _table(shape) or sizes[STATES] != shape.num_bytes or len(checksums) != len(shape.lengths):
            return None
        with contextlib.suppress(OSError):
            os.utime(directory)  # marks it as used now
        return StoredStates(directory, shape, checksums)
    except (OSError, ValueError):
        return None


def write_store(directory: Path, shape: StatesShape, computed: Computed) -> StoredStates:
    """Write what is computed, and return the store. Raises DiskError if it cannot be written, or does not fit."""
    _check_space(directory, shape)
    try:
        if os.path.lexists(directory):
            remove_directory(directory)  # damaged
        with new_directory(directory) as temporary:
            forget_unused(directory.parent)
            _write(temporary, shape, computed)
    except DiskError as error:
        if (found := read_store(directory, shape)) is not None:  # another process was faster
            return found
        raise DiskError(f"{error} Set DUALTUNE_CACHE to a directory on another disk, or {KEY}=none") from error
    found = read_store(directory, shape)
    if found is None:
        raise DiskError(f"{directory}: the hidden states were written, but are not there. Set {KEY}=none")
    return found


def _write(directory: Path, shape: StatesShape, computed: Computed) -> None:
    checksums, starts = np.zeros(len(shape.lengths), "<u4"), shape.starts
    with contextlib.ExitStack() as files:

        def open_file(name: str) -> BinaryIO:
            return files.enter_context((directory / name).open("xb"))

        states, sums, table = open_file(STATES), open_file(CHECKSUMS), open_file(TABLE)
        for document, states_TD in computed:
            raw = np.ascontiguousarray(states_TD, shape.dtype).tobytes()
            assert len(raw) == starts[document + 1] - starts[document]
            checksums[document] = zlib.crc32(raw)
            states.seek(int(starts[document]))
            states.write(raw)
        sums.write(checksums.tobytes())
        table.write(json_bytes(_table(shape)))
        for file in (states, sums, table):
            file.flush()
            os.fsync(file.fileno())


def _table(shape: StatesShape) -> dict[str, Any]:
    return {"dtype": shape.dtype.str, "width": shape.width, "documents": len(shape.lengths), "bytes": shape.num_bytes}


def _check_space(directory: Path, shape: StatesShape) -> None:
    free = shutil.disk_usage(existing(directory)).free
    if free < shape.num_bytes:
        tokens = f"{int(shape.lengths.sum())} tokens of {shape.width * shape.dtype.itemsize} bytes each"
        needs = f"{in_bytes(shape.num_bytes)} for {tokens}"
        raise DiskError(
            f"{KEY}: {directory.parent} needs {needs}, but the disk has {in_bytes(free)} free. Free some space, "
            f"set DUALTUNE_CACHE to a directory on another disk, or {KEY}=none"
        )
