"""The cache of tokenized data: one store for each (content of the files, tokenizer, template, settings).

It is in $DUALTUNE_CACHE, or $XDG_CACHE_HOME/dualtune, or ~/.cache/dualtune. Stores are written atomically. Creating a
store removes those that have not been used for thirty days.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dualtune.data.sources.bad_rows import BadRows
from dualtune.data.tokens.store import INDEX, INDEX_FILE, TOKENS, WEIGHTS, TokenFile, TokenStore, Writer
from dualtune.errors import DiskError
from dualtune.io.disk import cache_dir, hidden_sibling, json_bytes, remove_directory
from dualtune.versions import versions_of

TABLE = "store.json"
KEPT_DAYS = 30

Build = Callable[[Writer, BadRows], None]


def open_store(key: Mapping[str, Any], build: Build) -> TokenStore:
    """Return the store of this key from the cache, or create it with `build(writer, bad_rows)` and cache it.

    If the cache cannot be written, the store lasts until the process ends. Raises DiskError without any disk space.
    """
    parts = {**key, "versions": versions_of(("tokenizers", "jinja2", "numpy")), "code": _code()}
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    directory = cache_dir() / "data" / name
    if found := _read(directory):
        with contextlib.suppress(OSError):
            os.utime(directory)  # marks it as used now
        return found
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = hidden_sibling(directory)
        temporary.mkdir()
    except OSError:
        return _in_process(build)
    try:
        _write(temporary, build)
        forget_unused(directory.parent)
        with contextlib.suppress(OSError, DiskError):  # another process was faster
            if directory.exists() and _read(directory) is None:  # damaged
                remove_directory(directory)
            temporary.rename(directory)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
    store = _read(directory)
    if store is None:
        raise DiskError(
            f"{directory}: the tokenized data was written, but is not there. Set DUALTUNE_CACHE to another directory"
        )
    return store


@functools.cache
def _code() -> str:
    """Return a hash of the source of `dualtune.data`, which converts rows to tokens."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(directory: Path, build: Build) -> None:
    bad = BadRows()
    try:
        with contextlib.ExitStack() as files:

            def open_file(name: str) -> BinaryIO:
                return files.enter_context((directory / name).open("xb"))

            tokens, index = open_file(TOKENS), open_file(INDEX_FILE)
            writer = Writer(tokens, index, lambda: open_file(WEIGHTS))
            build(writer, bad)
            writer.finish()
            for file in (tokens, index, *([writer.weights] if writer.weights else [])):
                file.flush()
                os.fsync(file.fileno())
        names = [TOKENS, INDEX_FILE] + [WEIGHTS] * (writer.weights is not None)
        sizes = {name: (directory / name).stat().st_size for name in names}
        table = {**writer.table(), "num_bad": bad.count, "bad": bad.first, "bytes": sizes}
        (directory / TABLE).write_bytes(json_bytes(table))
    except OSError as error:
        raise DiskError(
            f"{directory.parent}: the tokenized data cannot be written: {error.strerror or error}. "
            "Free disk space, or set DUALTUNE_CACHE to a directory on another disk"
        ) from error


def _read(directory: Path) -> TokenStore | None:
    """Read the store at this path; None if there is no complete one."""
    try:
        table = json.loads((directory / TABLE).read_text(encoding="utf-8"))
        if any((directory / name).stat().st_size != size for name, size in table["bytes"].items()):
            return None
        file = directory / INDEX_FILE
        index = np.memmap(file, INDEX, mode="r") if file.stat().st_size else np.zeros(0, INDEX)  # cannot map 0 bytes
        counts = (table["num_rows"], table["num_bad"], tuple(table["bad"]))
        weights = TokenFile(directory / WEIGHTS, "<f4") if WEIGHTS in table["bytes"] else None
        left_out, notices = table.get("left_out", {}), table.get("notices", {})  # an older dualtune counted neither
        files, tokens = tuple(table["files"]), TokenFile(directory / TOKENS)
        return TokenStore(tokens, index, files, *counts, directory, weights, left_out, notices)
    except (OSError, ValueError, KeyError):
        return None


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dualtune-")  # removed when the process ends


def _in_process(build: Build) -> TokenStore:
    directory = Path(tempfile.mkdtemp(dir=_scratch().name))
    _write(directory, build)
    store = _read(directory)
    assert store is not None
    return store


def forget_unused(directory: Path) -> None:
    """Remove stores that have not been used for long, and leftovers of killed processes."""
    oldest = time.time() - KEPT_DAYS * 86_400
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path)
