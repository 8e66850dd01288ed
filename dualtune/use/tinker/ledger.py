"""What a client says of its runs and checkpoints besides: metadata, and when a checkpoint expires. In one file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.files import write_file

FILE = "tinker_notes.json"
MAX_FILE = 1 << 26


class _Notes(BaseModel):
    expires_at: float | None = None
    user_metadata: dict[str, Any] | None = None


class Ledger:
    """The notes on runs (by their id) and checkpoints (by their path). Any thread may call these."""

    def __init__(self, runs_dir: Path) -> None:
        self._path, self._lock = runs_dir / FILE, threading.Lock()
        self._notes: dict[str, dict[str, Any]] = _read(self._path)

    def note(self, of: str, *, ttl_s: float | None = None, metadata: Mapping[str, Any] | None = None) -> None:
        """Replace the notes on a run or a checkpoint."""
        notes = {
            "expires_at": None if ttl_s is None else time.time() + ttl_s,
            "user_metadata": None if metadata is None else dict(metadata),
        }
        with self._lock:
            self._set(of, notes)

    def set_ttl(self, of: str, ttl_s: float | None) -> None:
        """Let a checkpoint expire at another time, or never."""
        with self._lock:
            self._set(of, {**self._notes.get(of, {}), "expires_at": None if ttl_s is None else time.time() + ttl_s})

    def forget(self, of: str) -> None:
        """Forget a checkpoint."""
        with self._lock:
            self._set(of, {})

    def metadata(self, of: str) -> dict[str, Any] | None:
        """Return the metadata of a run or a checkpoint."""
        return self._notes.get(of, {}).get("user_metadata")

    def expires_at(self, of: str) -> float | None:
        """Return when a checkpoint expires; None: never."""
        return self._notes.get(of, {}).get("expires_at")

    def expired(self) -> list[str]:
        """Return the checkpoints whose time is over."""
        now = time.time()
        with self._lock:
            return [path for path, notes in self._notes.items() if (notes.get("expires_at") or now) < now]

    def _set(self, of: str, notes: Mapping[str, Any]) -> None:
        entry = {key: value for key, value in notes.items() if value is not None}
        if entry == self._notes.get(of, {}):
            return
        noted = {key: value for key, value in self._notes.items() if key != of} | ({of: entry} if entry else {})
        text = json.dumps(noted, indent=1)
        if entry and len(text) > MAX_FILE:  # it could not be read again
            raise ConfigError(f"user_metadata: {FILE} has at most {MAX_FILE} bytes. Delete checkpoints, or say less")
        self._notes = noted
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._path, text)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_bytes()[:MAX_FILE])
        entries = {str(of): {**_Notes.model_validate(notes).model_dump()} for of, notes in table.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}. Without it, no checkpoint expires: rename it") from error
    return entries
