"""Files and directories that are written whole or not at all, even if the machine stops in between."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dualtune import faults
from dualtune.errors import DiskError

_MARK = ".tmp-"  # in the name of everything that is not finished, or no longer wanted


def write_directory(target: Path, files: Mapping[str, bytes]) -> None:
    """Create the directory with these files. DiskError if that fails; then nothing is left there.

    They are written and fsynced in a sibling (same file system), which is then renamed into place.
    """
    temporary = hidden_sibling(target)
    try:
        if not target.parent.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _fsync_directory(target.parent.parent)
        temporary.mkdir()
        for name, data in files.items():
            with (temporary / name).open("xb") as file:
                _write(file, data)
        _fsync_directory(temporary)
        faults.reach("synced")
        temporary.rename(target)  # atomic; replaces an empty directory and nothing else
        faults.reach("renamed")
        _fsync_directory(target.parent)
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror or error}. Nothing was left there.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def json_bytes(table: Mapping[str, Any]) -> bytes:
    """The content of a JSON file. ValueError for NaN and Infinity, which JSON does not have."""
    return (json.dumps(table, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def listing(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """What a manifest says of files: the size and sha256 of each."""
    return {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}


def write_file(target: Path, text: str) -> None:
    """Create or replace a file. DiskError if that fails; then the old one is still there."""
    temporary = hidden_sibling(target)
    try:
        with temporary.open("xb") as file:
            _write(file, text.encode())
        temporary.replace(target)
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_directory(path: Path) -> None:
    """Remove a directory in a way that never shows half of it under its name. DiskError if that fails."""
    doomed = hidden_sibling(path)
    try:
        path.rename(doomed)
        faults.reach("doomed")
        shutil.rmtree(doomed)
    except OSError as error:
        raise DiskError(f"{path}: cannot be removed: {error.strerror or error}") from error


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what a killed process left half-written or half-removed in a directory. What could be removed is named."""
    found = sorted(directory.glob(f".*{_MARK}*"))
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return [path for path in found if not path.exists()]


def hidden_sibling(path: Path) -> Path:
    """A name beside the path that nobody else uses and that `remove_leftovers` knows."""
    return path.with_name(f".{path.name}{_MARK}{os.getpid()}-{secrets.token_hex(4)}")


def _write(file: BinaryIO, data: bytes) -> None:
    done = faults.allowed("write", len(data))
    file.write(data[:done])
    file.flush()
    if done < len(data):
        faults.die()
    os.fsync(file.fileno())


def _fsync_directory(path: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
