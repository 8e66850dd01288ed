"""Detect files that are replaced during a run, by comparing what is at a path now with what was opened."""

from __future__ import annotations

import os
from pathlib import Path

from dualtune.io.disk import free_name


class OpenDirectory:
    """A directory that stays open, so that its inode number is not reused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def fault(self) -> str | None:
        """Return what happened to the path since; None if it still leads here."""
        return fault_of(self._path, self._file)

    def close(self) -> None:
        os.close(self._file)


def fault_of(path: Path, file: int) -> str | None:
    """Return what happened to the path of an open file or directory; None if it still leads to it."""
    try:
        is_same = os.path.samestat(path.stat(), os.fstat(file))
    except OSError as error:
        return f"{path} was deleted" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}"
    return None if is_same else f"{path} was replaced"


def set_aside(path: Path) -> str:
    """Rename a foreign file that has replaced ours, if there is one. Returns a description of what was done."""
    if not os.path.lexists(path):
        return ""
    kept = free_name(path.with_name(f"{path.name}.replaced"))
    path.rename(kept)
    return f"; what was there is kept as {kept.name}"
