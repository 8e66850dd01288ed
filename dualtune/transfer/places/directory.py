"""A directory: a disk, a share, a synchronized folder. As over ssh, only the chunks that are missing are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from pathlib import Path

from dualtune import interrupt
from dualtune.adapter.files import sha256_of
from dualtune.disk import fsync
from dualtune.errors import DiskError, EnvironmentFault
from dualtune.transfer.places.chunks import Chunks, chunks_of, pieces_of
from dualtune.transfer.places.patience import Cut, Patience
from dualtune.transfer.places.store import Found, Upload


class DirectoryStore:
    """Files of this machine, or of one whose disk is mounted here."""

    def shown(self, path: str) -> str:
        return path

    def look(self, upload: Upload) -> Found:
        final, part = Path(upload.path), Path(upload.part)
        size = upload.chunks.num_bytes
        with _writing(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.is_dir():
                raise IsADirectoryError(None, "is a directory")
            if part.exists() and part.stat().st_size > size:
                part.unlink()
            is_there = os.path.lexists(final)
            is_equal = is_there and final.stat().st_size == size
            return Found(is_there, chunks_of(final) if is_equal else None, _chunks_if_there(part, size))

    def send(self, upload: Upload, runs: Sequence[range], patience: Patience) -> None:
        final, part, chunks = Path(upload.path), Path(upload.part), upload.chunks
        done = chunks.num_bytes - sum(map(chunks.bytes_in, runs))
        with _writing(final):
            part.touch()
            with part.open("r+b") as out:
                for run in runs:
                    out.seek(run.start * chunks.chunk_bytes)
                    for piece in pieces_of(upload.file, chunks, run):
                        interrupt.poll()
                        out.write(piece)
                        done += len(piece)
                        patience.show(done, chunks.num_bytes)
            fsync(part)
            if sha256_of(part) != upload.sha256:
                raise Cut(f"{part} has another sha256 than what was written")
            if os.path.lexists(final) and not upload.force:
                raise FileExistsError(None, "is there already")
            part.replace(final)
            fsync(final.parent)
            for stale in final.parent.iterdir():
                if stale.name.startswith(f"{part.name.rpartition('-')[0]}-"):
                    stale.unlink(missing_ok=True)

    def chunks(self, path: str) -> Chunks | None:
        with _reading(path):
            return _chunks_if_there(Path(path), None)

    def read(self, path: str, chunks: Chunks, run: range) -> Generator[bytes]:
        with _reading(path):
            yield from pieces_of(Path(path), chunks, run)


def _chunks_if_there(path: Path, of_bytes: int | None) -> Chunks | None:
    return chunks_of(path, of_bytes) if path.is_file() else None


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
