"""What a run records of the machine and of its start, for environment.json."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dualtune.base.redaction import redact
from dualtune.base.versions import VERSION, versions_of
from dualtune.engine.backend import Backend
from dualtune.engine.card import by_preference
from dualtune.engine.detect import detect

MODULES = {"main.py", "__main__.py"}  # how `python -m dualtune` names itself


def recorded_packages() -> list[str]:
    """Return the packages with versions that help to explain differences between two machines."""
    of_backends = (name for card in by_preference() for name in card.package.recorded)
    return ["dualtune", "numpy", "tokenizers", "transformers", *of_backends]


def environment(backend: Backend, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts about the machine that a reader of the results needs; nothing about its user."""
    return {
        "dualtune": VERSION,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "backend": backend.name,
        "devices": [{"name": d.name, "kind": d.kind, "total_bytes": d.total_bytes} for d in backend.devices()],
        "engine": dict(engine),
        "packages": versions_of(recorded_packages()),
    }


def start() -> dict[str, Any]:
    """Return when and by which command this process was started, and the hardware in full.

    The end is in the last row of metrics.jsonl and in the lock, so that environment.json is never written again.
    """
    machine = detect()
    hardware = {
        "system": platform.platform(),
        "cpu": machine.cpu,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "driver": machine.driver,
        "cuda": machine.cuda,
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": now, "command": command_line(sys.argv), "directory": working_directory(), "hardware": hardware}


def command_line(arguments: Sequence[str]) -> str:
    """Return the command for a shell: secrets are redacted, and the program of dualtune is called dualtune."""
    program = Path(arguments[0] if arguments else "")
    is_ours = program.name in MODULES and "dualtune" in program.parts
    return redact(shlex.join(["dualtune" if is_ours else program.name, *arguments[1:]]))


def working_directory() -> str:
    """Return where the command was given, for its relative paths; ~ is the home directory, whose name is the user's."""
    try:
        path, home = Path.cwd(), Path.home()
    except (OSError, RuntimeError):  # it was removed, or there is no home
        return ""
    return redact(str("~" / path.relative_to(home) if path.is_relative_to(home) else path))
