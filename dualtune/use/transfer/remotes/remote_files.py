"""Remotes that are file systems: a directory of this machine, and those of fsspec."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DiskError, DualtuneError, EnvironmentFault, FormatError
from dualtune.base.files import Folder, open_regular
from dualtune.base.untrusted import open_file
from dualtune.use.transfer.remotes.retries import AbsentFault, Cut, Patience
from dualtune.use.transfer.remotes.store import (
    MAX_FILE_BYTES,
    MOST_CHUNK_BYTES,
    Chunks,
    ChunkStore,
    StoredState,
    Upload,
    check_unchanged,
    chunks_in,
    chunks_of,
    pieces_of,
    sha256_in,
)

# ----------------------------------------------------------------------------------------------------------------------
# A directory: a disk, a share, a synchronized folder. As over ssh, only missing chunks are written.


class DirectoryStore(ChunkStore):
    """Files on a disk of this machine, or on one mounted here."""

    def shown(self, path: str) -> str:
        return path

    def look(self, upload: Upload) -> StoredState:
        final, part_name, size = Path(upload.path), Path(upload.part).name, upload.chunks.num_bytes
        with _writing(final), Folder(final.parent) as folder:
            if final.is_dir():
                raise IsADirectoryError(None, "is a directory")
            stored = chunks_of(final) if final.is_file() and final.stat().st_size == size else None
            partial = None
            if (part := folder.find_part(part_name)) is not None:
                with part:
                    partial = chunks_in(part, size)
            return StoredState(folder.holds(final.name), stored, partial)

    def send(self, upload: Upload, runs: Sequence[range], patience: Patience) -> None:
        final, part_name, chunks = Path(upload.path), Path(upload.part).name, upload.chunks
        done = chunks.num_bytes - sum(map(chunks.bytes_in, runs))
        with _writing(final), Folder(final.parent) as folder, folder.part(part_name) as part:
            folder.check_space(chunks.num_bytes, part)
            for run in runs:
                part.seek(run.start * chunks.chunk_bytes)
                for piece in pieces_of(upload.file, chunks, run):
                    interrupt.poll()
                    part.write(piece)
                    done += len(piece)
                    patience.show(done, chunks.num_bytes)
            part.truncate(chunks.num_bytes)
            if sha256_in(part) != upload.sha256:
                raise Cut(f"{final.with_name(part_name)} has the wrong sha256 after writing")
            if folder.holds(final.name) and not upload.force:
                raise FileExistsError(None, "already exists")
            folder.publish(part, part_name, final.name)
            folder.remove_parts(part_name)

    def chunks(self, path: str) -> Chunks | None:
        with _reading(path):
            return chunks_of(Path(path)) if Path(path).is_file() else None

    def read(self, path: str, chunks: Chunks, run: range) -> Generator[bytes]:
        with _reading(path), open_regular(Path(path)) as file:
            yield from pieces_of(file, chunks, run)


@contextlib.contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _reading(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(f"{path}: cannot be read: {error.strerror or error}") from error


# ----------------------------------------------------------------------------------------------------------------------
# A file system of fsspec: s3, gs, az, memory, and those that other packages bring.
#
# An object store shows an object only when it is complete, and cannot hash a part of it. So a file is sent whole: first
# under a temporary name, then renamed when its size is right. https://filesystem-spec.readthedocs.io


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """The file system of a URL."""

    fs: Any  # fsspec.AbstractFileSystem, which has no types
    protocol: str

    def shown(self, path: str) -> str:
        return str(self.fs.unstrip_protocol(path))

    def push(self, file: Path, path: str, *, verified: str | None, force: bool, patience: Patience) -> bool:
        """Copy a file there. False if the same one was there already; ConfigError if another is, unless `force`."""
        where = self.shown(path)
        with open_file(file) as source:
            sha256 = sha256_in(source)
            check_unchanged(file, sha256, verified)

            def attempt() -> bool:
                with self._own_errors(where):
                    self.fs.invalidate_cache()
                    if self.fs.exists(path):
                        if self._is_same(source, path):
                            return False
                        if not force:
                            raise ConfigError(f"{where}: another file already exists there. Replace it with --force")
                    self._put(source, path, sha256, patience)
                    return True

            return patience.keep_trying(attempt, where)

    def pull(self, path: str, target: Path, *, patience: Patience, most: int = MAX_FILE_BYTES) -> Path:
        """Fetch a file into a hidden file next to the target; the caller verifies and renames it."""
        where, part = self.shown(path), target.with_name(f".{target.name}.part-{self.protocol}")

        def look() -> int:
            with self._own_errors(where):
                if not self.fs.isfile(path):
                    raise AbsentFault(where)
                return int(self.fs.info(path)["size"])

        num_bytes = patience.keep_trying(look, where)
        if num_bytes > most:
            raise FormatError(f"{where}: has {num_bytes} bytes, at most {most} are allowed")
        try:
            with Folder(part.parent) as folder, contextlib.ExitStack() as undo:
                # An object store has no hashes to compare a part with, so a pull that was cut starts again.
                undo.callback(folder.remove, part.name)
                with folder.part(part.name) as out:
                    folder.check_space(num_bytes, out)
                    for start in range(0, num_bytes, MOST_CHUNK_BYTES):
                        end = min(start + MOST_CHUNK_BYTES, num_bytes)
                        read = functools.partial(self._read, path, start, end)
                        out.write(patience.keep_trying(read, where))
                        patience.reached(end, num_bytes)
                    out.truncate(num_bytes)
                    os.fsync(out.fileno())
                undo.pop_all()
        except OSError as error:
            raise DiskError(f"{part}: cannot be written: {error.strerror or error}") from error
        return part

    def _put(self, source: BinaryIO, path: str, sha256: str, patience: Patience) -> None:
        folder, _, name = path.rpartition("/")
        part = f"{folder}/.{name}.part-{secrets.token_hex(8)}"
        num_bytes, digest = os.fstat(source.fileno()).st_size, hashlib.sha256()
        try:
            self.fs.makedirs(folder, exist_ok=True)
            source.seek(0)
            with self.fs.open(part, "wb") as out:
                while piece := source.read(MOST_CHUNK_BYTES):
                    interrupt.poll()
                    out.write(piece)
                    digest.update(piece)
                    patience.show(source.tell(), num_bytes)
            if digest.hexdigest() != sha256:
                raise FormatError(f"{self.shown(path)}: the local file was changed while it was sent. Push it again")
            if (size := int(self.fs.info(part)["size"])) != num_bytes:
                raise Cut(f"{size} of {num_bytes} bytes are there")
            self.fs.mv(part, path)
        except BaseException:
            with contextlib.suppress(Exception):  # only a clean-up: the first error is reported
                self.fs.rm(part)
            raise

    def _is_same(self, source: BinaryIO, path: str) -> bool:
        """Compare the size and the first MOST_CHUNK_BYTES, where a bundle lists the sha256 of all its files."""
        if int(self.fs.info(path)["size"]) != (num_bytes := os.fstat(source.fileno()).st_size):
            return False
        end = min(MOST_CHUNK_BYTES, num_bytes)
        source.seek(0)
        return self._read(path, 0, end) == source.read(end)

    def _read(self, path: str, start: int, end: int) -> bytes:
        with self._own_errors(self.shown(path)):
            interrupt.poll()
            raw = cast(bytes, self.fs.cat_file(path, start=start, end=end))
        if len(raw) != end - start:
            raise Cut(f"got {len(raw)} of {end - start} bytes from byte {start} on")
        return raw

    @contextlib.contextmanager
    def _own_errors(self, where: str) -> Generator[None]:
        """Turn the errors of any file system into our own."""
        try:
            yield
        except (Cut, DualtuneError):
            raise
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
            raise EnvironmentFault(
                f"{where}: {type(error).__name__}: {error}. Check the name and your permissions"
            ) from error
        except (OSError, EOFError) as error:
            raise Cut(f"{type(error).__name__}: {error}") from error
        except Exception as error:  # no common base class: the client of each service has its own errors
            raise EnvironmentFault(f"{where}: {self.protocol} failed: {type(error).__name__}: {error}") from error


def open_url(url: str) -> tuple[RemoteFiles, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise EnvironmentFault(f"{url}: needs fsspec. Install it with: pip install 'dualtune[fsspec]'") from error
    protocol = url.partition("://")[0]
    try:
        fs, path = cast(Any, fsspec).core.url_to_fs(url)
    except ImportError as error:  # says which package is missing
        raise EnvironmentFault(f"{url}: {error}") from error
    except ValueError as error:
        allowed = "user@host:path, ssh://, hf://, a directory, s3://, gs://, memory:// and every other URL of fsspec"
        raise ConfigError(f"TARGET: got {url!r}: {error}. Allowed: {allowed}") from error
    return RemoteFiles(fs, protocol), str(path)
