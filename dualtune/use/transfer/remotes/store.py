"""Push a file to a store and pull one from it, chunk by chunk, for any kind of store.

A file travels under a temporary name, `.NAME.part-HASH`, with the hash of the whole content: the next attempt with the
same content resumes from it, and no other does. It gets its final name when all of it is verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DiskError, FormatError
from dualtune.base.files import Folder, open_regular
from dualtune.base.untrusted import open_file
from dualtune.use.transfer.bundles.names import MAX_TOTAL_BYTES, MIB
from dualtune.use.transfer.remotes.retries import AbsentFault, Cut, Patience

# ----------------------------------------------------------------------------------------------------------------------
# A file as chunks with a hash each: which of them are there, which are missing, and whether the file is complete.
#
# An interrupted transfer resumes with the chunks that are missing or wrong. They are found by hashing what the other
# end has, never only by its size.

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


def missing(chunks: Chunks, present: Chunks | None) -> list[range]:
    """Return the runs of consecutive chunks that are missing or wrong in `present`."""
    stored = present.sha256s if present else ()
    runs: list[range] = []
    for i, sha256 in enumerate(chunks.sha256s):
        if stored[i : i + 1] == (sha256,):
            continue
        if runs and runs[-1].stop == i:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def pieces_of(file: BinaryIO, chunks: Chunks, run: range) -> Iterator[bytes]:
    """Yield the bytes of a run of chunks of an open file."""
    remaining = chunks.bytes_in(run)
    file.seek(run.start * chunks.chunk_bytes)
    while remaining and (piece := file.read(min(PIECE_BYTES, remaining))):
        remaining -= len(piece)
        yield piece


# ----------------------------------------------------------------------------------------------------------------------
# A store, and what travels to and from it.

MAX_FILE_BYTES = MAX_TOTAL_BYTES + MIB  # a bundle with its headers


@dataclass(frozen=True, slots=True)
class Upload:
    """A file on its way to a store."""

    file: BinaryIO  # opened once, so that the hashed file is the one sent
    chunks: Chunks
    sha256: str
    path: str  # in the store
    part: str  # the temporary path next to it
    force: bool  # replace an existing file


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a store already has of an upload."""

    is_there: bool = False  # a file with the final name exists
    final: Chunks | None = None  # its content, if it has the size of the upload
    part: Chunks | None = None


class ChunkStore(ABC):
    """Storage that can hash its files without a transfer. Its own methods raise Cut if another attempt may succeed."""

    @abstractmethod
    def shown(self, path: str) -> str:
        """Return a path as the user would write it."""

    @abstractmethod
    def look(self, upload: Upload) -> StoredState:
        """Return what is stored. Creates the directory; removes a part that is longer than the file."""

    @abstractmethod
    def send(self, upload: Upload, runs: Sequence[range], patience: Patience) -> None:
        """Write these runs of chunks into the part; then verify its sha256 and give it its final name."""

    @abstractmethod
    def chunks(self, path: str) -> Chunks | None:
        """Return the chunks of a file, None if it does not exist."""

    @abstractmethod
    def read(self, path: str, chunks: Chunks, run: range) -> Generator[bytes]:
        """Yield the bytes of a run of chunks."""

    def push(self, file: Path, path: str, *, verified: str | None, force: bool, patience: Patience) -> bool:
        """Copy a file to a path of the store. False if the same file was there already.

        ConfigError if another one is there, unless `force`; EnvironmentFault if the transfer failed; FormatError if the
        file does not have the sha256 that was verified before.
        """
        with open_file(file) as source:
            chunks, sha256 = chunks_and_sha256_in(source)
            check_unchanged(file, sha256, verified)
            upload = Upload(source, chunks, sha256, path, _part_of(path, sha256), force)

            def attempt() -> bool:
                state = self.look(upload)
                if state.final == chunks:
                    return False
                if state.is_there and not force:
                    raise ConfigError(f"{self.shown(path)}: another file already exists there. Replace it with --force")
                runs = missing(chunks, state.part)
                patience.reached(chunks.num_bytes - sum(map(chunks.bytes_in, runs)), chunks.num_bytes)
                self.send(upload, runs, patience)
                patience.reached(chunks.num_bytes, chunks.num_bytes)
                return True

            return patience.keep_trying(attempt, self.shown(path))

    def pull(self, path: str, target: Path, *, patience: Patience, most: int = MAX_FILE_BYTES) -> Path:
        """Fetch a file into a hidden file next to the target, every chunk verified. The caller renames it.

        AbsentFault if it does not exist, EnvironmentFault if the transfer failed, FormatError if it has more than
        `most` bytes.
        """

        def attempt() -> Path:
            chunks = self.chunks(path)
            if chunks is None:
                raise AbsentFault(self.shown(path))
            if chunks.num_bytes > most:
                raise FormatError(f"{self.shown(path)}: has {chunks.num_bytes} bytes, at most {most} are allowed")
            part = target.with_name(_part_of(target.name, chunks.identity))
            try:
                with Folder(part.parent) as folder:
                    self._fetch(path, chunks, folder, part.name, patience)
            except OSError as error:
                raise DiskError(f"{part}: cannot be written: {error.strerror or error}") from error
            return part

        return patience.keep_trying(attempt, self.shown(path))

    def _fetch(self, path: str, chunks: Chunks, folder: Folder, name: str, patience: Patience) -> None:
        """Complete the part of that name: only the chunks that it lacks are read."""
        with folder.part(name) as part:
            folder.check_space(chunks.num_bytes, part)
            runs = missing(chunks, chunks_in(part, chunks.num_bytes))
            done = chunks.num_bytes - sum(map(chunks.bytes_in, runs))
            patience.reached(done, chunks.num_bytes)
            for run in runs:
                part.seek(run.start * chunks.chunk_bytes)
                for chunk in _verified(self.read(path, chunks, run), chunks, run):
                    part.write(chunk)
                    part.flush()
                    done += len(chunk)
                    patience.reached(done, chunks.num_bytes)
            part.truncate(chunks.num_bytes)
            os.fsync(part.fileno())
        folder.remove_parts(name, keep=name)


def check_unchanged(file: Path, sha256: str, verified: str | None) -> None:
    """Raise FormatError if a file does not have the sha256 that was verified before; None: it was not verified."""
    if verified not in (None, sha256):
        raise FormatError(f"{file}: was changed after it was verified. Nothing was sent")


def _verified(pieces: Generator[bytes], chunks: Chunks, run: range) -> Iterator[bytes]:
    """Yield whole chunks, each with the right hash."""
    waiting = bytearray()
    with contextlib.closing(pieces) as arriving:
        for i in run:
            size = chunks.bytes_in(range(i, i + 1))
            while len(waiting) < size:
                interrupt.poll()
                if (piece := next(arriving, None)) is None:
                    raise Cut(f"the data ended in chunk {i + 1} of {len(chunks.sha256s)}")
                waiting += piece
            chunk = bytes(waiting[:size])
            if hashlib.sha256(chunk).hexdigest() != chunks.sha256s[i]:
                raise Cut(f"chunk {i + 1} of {len(chunks.sha256s)} has the wrong hash")
            del waiting[:size]
            yield chunk


def _part_of(path: str, sha256: str) -> str:
    whole = PurePosixPath(path)
    return os.fspath(whole.with_name(f".{whole.name}.part-{sha256[:16]}"))
