"""A directory or a file that is written piece by piece beside its place, and appears there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from dualtune.disk import hidden_sibling
from dualtune.errors import DiskError


@contextlib.contextmanager
def new_directory(target: Path) -> Generator[Path]:
    """A directory to write into, which becomes `target` at the end of the block; after an error nothing remains."""
    temporary = hidden_sibling(target)
    made: list[Path] = []
    is_done = False
    try:
        made += [path for path in target.parents if not path.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for path in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
            fsync(path)
        temporary.rename(target)  # atomic; replaces an empty directory and nothing else
        is_done = True
        fsync(target.parent)
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror or error}. Nothing was left there.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # another program may use them by now
            for path in made if not is_done else []:
                path.rmdir()


@contextlib.contextmanager
def new_file(target: Path) -> Generator[BinaryIO]:
    """A file to write, which becomes `target` at the end of the block; after an error nothing remains."""
    temporary = hidden_sibling(target)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            fsync(temporary)
        temporary.rename(target)
        fsync(target.parent)
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror or error}. Nothing was left there.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def fsync(path: Path) -> None:
    """Make a file or the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
