"""A file as chunks with a hash each: which of them are there, which are missing, and whether the file is complete.

An interrupted transfer resumes with the chunks that are missing or wrong. They are found by hashing what the other end
has, never only by its size.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dualtune.io.folder import open_regular

LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 256 << 10, 8 << 20
MANY_CHUNKS = 256  # chunks of a file, until a chunk reaches MOST_CHUNK_BYTES
PIECE_BYTES = 256 << 10  # bytes read and written at once


@dataclass(frozen=True, slots=True)
class Chunks:
    """The content of a file: its size in bytes, and the sha256 of each chunk."""

    num_bytes: int
    sha256s: tuple[str, ...]

    @property
    def chunk_bytes(self) -> int:
        return chunk_bytes(self.num_bytes)

    @property
    def identity(self) -> str:
        """A hash of the whole content, computed from the hashes of the chunks."""
        return hashlib.sha256("\n".join(self.sha256s).encode()).hexdigest()

    def bytes_in(self, run: range) -> int:
        """Return the number of bytes of a run of chunks. The last chunk of a file may be short."""
        return min(run.stop * self.chunk_bytes, self.num_bytes) - run.start * self.chunk_bytes


def chunk_bytes(num_bytes: int) -> int:
    """Return the chunk size for a file of this size. Both ends compute it (see `ssh_script`)."""
    size = LEAST_CHUNK_BYTES
    while size < MOST_CHUNK_BYTES and size * MANY_CHUNKS < num_bytes:
        size *= 2
    return size


def chunks_of(path: Path, of_bytes: int | None = None) -> Chunks:
    """Return the chunks of a regular file. `of_bytes`: the final size of a partial file, which sets the chunk size."""
    with open_regular(path) as file:
        return chunks_in(file, of_bytes)


def chunks_in(file: BinaryIO, of_bytes: int | None = None) -> Chunks:
    """Return the chunks of an open file, as in `chunks_of`."""
    return chunks_and_sha256_in(file, of_bytes)[0]


def chunks_and_sha256_in(file: BinaryIO, of_bytes: int | None = None) -> tuple[Chunks, str]:
    """Return the chunks of an open file, and the sha256 of all of it. The file is read once."""
    num_bytes = os.fstat(file.fileno()).st_size
    size = chunk_bytes(num_bytes if of_bytes is None else of_bytes)
    hashes, whole = list[str](), hashlib.sha256()
    file.seek(0)
    while chunk := file.read(size):
        hashes.append(hashlib.sha256(chunk).hexdigest())
        whole.update(chunk)
    return Chunks(num_bytes, tuple(hashes)), whole.hexdigest()


def sha256_in(file: BinaryIO) -> str:
    """Return the sha256 of an open file, from its beginning."""
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def missing(wanted: Chunks, found: Chunks | None) -> list[range]:
    """Return the runs of consecutive chunks that are missing or wrong in `found`."""
    there = found.sha256s if found else ()
    runs: list[range] = []
    for i, sha256 in enumerate(wanted.sha256s):
        if i < len(there) and there[i] == sha256:
            continue
        if runs and runs[-1].stop == i:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def pieces_of(file: BinaryIO, chunks: Chunks, run: range) -> Iterator[bytes]:
    """Yield the bytes of a run of chunks of an open file."""
    left = chunks.bytes_in(run)
    file.seek(run.start * chunks.chunk_bytes)
    while left and (piece := file.read(min(PIECE_BYTES, left))):
        left -= len(piece)
        yield piece
