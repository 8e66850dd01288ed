"""The note between the process that trains and its parent, which restarts it after a signal has killed it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualtune.io.disk import write_file


@dataclass(frozen=True, slots=True)
class RestartNote:
    """What a restarted process knows of the one before."""

    killed_by: str  # the name of the signal
    step: int | None = None  # the step from which that one was restarted; None: it was the first
    memory: Mapping[str, Any] = field(default_factory=lambda: {})  # its smaller settings, as in state.json


def read_restart(path: Path) -> RestartNote | None:
    """Return the note; None before the first restart."""
    return RestartNote(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def write_restart(path: Path, note: RestartNote) -> None:
    write_file(path, json.dumps(asdict(note)))
