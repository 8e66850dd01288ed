"""A directory: a disk, a share, a synchronized folder. As over ssh, only missing chunks are written."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

from dualtune import interrupt
from dualtune.errors import DiskError, EnvironmentFault
from dualtune.io.folder import Folder, open_regular
from dualtune.transfer.remotes.chunks import Chunks, chunks_in, chunks_of, pieces_of, sha256_in
from dualtune.transfer.remotes.patience import Cut, Patience
from dualtune.transfer.remotes.store import Found, Upload


class DirectoryStore:
    """Files on a disk of this machine, or on one mounted here."""

    def shown(self, path: str) -> str:
        return path

    def look(self, upload: Upload) -> Found:
        final, part_name, size = Path(upload.path), Path(upload.part).name, upload.chunks.num_bytes
        with _writing(final), Folder(final.parent) as folder:
            if final.is_dir():
                raise IsADirectoryError(None, "is a directory")
            there = chunks_of(final) if final.is_file() and final.stat().st_size == size else None
            begun = None
            if (part := folder.find_part(part_name)) is not None:
                with part:
                    begun = chunks_in(part, size)
            return Found(folder.holds(final.name), there, begun)

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
