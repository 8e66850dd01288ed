"""A file system of fsspec: s3, gs, az, memory, and those that other packages bring.

An object store shows an object only when it is complete, and cannot hash a part of it. So a file is sent whole: first
under a temporary name, then renamed when its size is right. https://filesystem-spec.readthedocs.io
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from dualtune import interrupt
from dualtune.errors import ConfigError, DiskError, DualtuneError, EnvironmentFault, FormatError
from dualtune.io.folder import Folder
from dualtune.transfer.remotes.chunks import MOST_CHUNK_BYTES, sha256_in
from dualtune.transfer.remotes.patience import AbsentFault, Cut, Patience
from dualtune.transfer.remotes.store import MAX_FILE_BYTES, check_unchanged, open_to_send


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
        with open_to_send(file) as source:
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

    def pull(self, path: str, target: Path, patience: Patience, *, most: int = MAX_FILE_BYTES) -> Path:
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
            with Folder(part.parent) as folder, _removed_if_cut(folder, part.name), folder.part(part.name) as out:
                folder.check_space(num_bytes, out)
                for start in range(0, num_bytes, MOST_CHUNK_BYTES):
                    end = min(start + MOST_CHUNK_BYTES, num_bytes)
                    out.write(patience.keep_trying(lambda start=start, end=end: self._read(path, start, end), where))
                    patience.reached(end, num_bytes)
                out.truncate(num_bytes)
                os.fsync(out.fileno())
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
            if (got := int(self.fs.info(part)["size"])) != num_bytes:
                raise Cut(f"{got} of {num_bytes} bytes are there")
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


@contextlib.contextmanager
def _removed_if_cut(folder: Folder, name: str) -> Generator[None]:
    """Remove a partial file on any error: an object store has no hashes to compare it with, so a pull starts again."""
    try:
        yield
    except BaseException:
        folder.remove(name)
        raise


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
        known = "user@host:path, ssh://, hf://, a directory, s3://, gs://, memory:// and every other URL of fsspec"
        raise ConfigError(f"TARGET: got {url!r}: {error}. Allowed: {known}") from error
    return RemoteFiles(fs, protocol), str(path)
