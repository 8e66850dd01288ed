"""Whether the files in the cache of huggingface_hub are the ones that the hub announced.

The library compares sizes only. But it names each file in its cache by the hash that the hub announced: SHA-256 for
large files, and for small ones Git's. A file is hashed when it is first used, and again if it has changed since.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dualtune import interrupt
from dualtune.errors import DiskError, FormatError
from dualtune.io.disk import cache_dir, write_file
from dualtune.io.untrusted import open_file

SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
GIT = re.compile(r"[0-9a-f]{40}", re.ASCII)  # SHA-1 of "blob SIZE\0" and the content
_PIECE = 16 << 20

Tell = Callable[[float], object]


def check_announced(files: Iterable[Path], tell: Tell = lambda share: None) -> None:
    """Compare files of a snapshot in the hub's cache with their names; others, and hashes of other kinds, are skipped.

    `tell` gets the share of the bytes that are hashed, if any must be. FormatError for a file with another hash.
    """
    blobs = {target: file for file in files if _is_hash(target := file.resolve())}
    waiting = [blob for blob in blobs if not _is_checked(blob)]
    total, done = sum(blob.stat().st_size for blob in waiting), 0
    for blob in waiting:
        before = _state(blob)
        digest, size = _digest(blob), before["size"]
        with open_file(blob) as stream:
            while piece := stream.read(_PIECE):
                interrupt.poll()
                digest.update(piece)
                done += len(piece)
                tell(min(1.0, done / total))
        if digest.hexdigest() != blob.name:
            raise FormatError(
                f"{blobs[blob]}: its {size} bytes are not those that the hub announced: their hash is "
                f"{digest.hexdigest()}, must be {blob.name}. The download was damaged, or somebody changed it. Remove "
                f"{blob} and run the same command again: it downloads the file again"
            )
        with suppress(OSError, DiskError):  # a mark that cannot be written costs time, later
            _mark(blob).parent.mkdir(parents=True, exist_ok=True)
            write_file(_mark(blob), json.dumps(before))


def _is_hash(target: Path) -> bool:
    in_cache = target.parent.name == "blobs" and target.is_file()
    return in_cache and bool(SHA256.fullmatch(target.name) or GIT.fullmatch(target.name))


def _digest(blob: Path) -> Any:
    if SHA256.fullmatch(blob.name):
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)


def _is_checked(blob: Path) -> bool:
    try:
        return json.loads(_mark(blob).read_text(encoding="ascii")) == _state(blob)
    except (OSError, ValueError):
        return False


def _state(blob: Path) -> dict[str, Any]:
    """Return what changes if the file does."""
    now = blob.stat()
    return {"path": str(blob), "size": now.st_size, "modified_ns": now.st_mtime_ns, "changed_ns": now.st_ctime_ns}


def _mark(blob: Path) -> Path:
    return cache_dir() / "announced" / hashlib.sha256(bytes(blob)).hexdigest()[:32]
