"""A run directory shared by several processes: the first owns it, the others get copies of what they need."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from dualtune import interrupt
from dualtune.config import Config
from dualtune.distributed.team import Team
from dualtune.io.disk import write_directory
from dualtune.io.untrusted import open_file
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.metrics import MAX_BYTES
from dualtune.train.state.run_dir import METRICS, RunDir, open_run


@contextlib.contextmanager
def open_together(config: Config, resume: str, team: Team) -> Generator[RunDir]:
    """Open the run in the first process with `open_run`; the others get a temporary directory.

    They start from the first one's checkpoint and rows, on whatever disk it is. If one fails in the block, all do.
    """
    with team.together():
        if team.is_first:
            with open_run(config, resume) as run_dir:
                rows = run_dir.path / METRICS
                shared(team, run_dir.saved)
                team.broadcast(_content(rows))
                yield run_dir
        else:
            with tempfile.TemporaryDirectory(prefix="dualtune-") as scratch, interrupt.handled():
                run_dir = RunDir(Path(scratch), shared(team, None))
                (run_dir.path / METRICS).write_bytes(team.broadcast())
                yield run_dir


def _content(path: Path) -> bytes:
    """Return the content of a file of the run; nothing if it is absent."""
    if not os.path.lexists(path):
        return b""
    with open_file(path, max_bytes=MAX_BYTES, is_own=True) as file:
        return file.read()


def shared(team: Team, saved: Checkpoint | None) -> Checkpoint | None:
    """Return the first process's checkpoint in all processes."""
    if team.size == 1 or not team.agree(saved is not None):
        return saved
    listed = json.dumps(checkpoint.files_of(saved) if saved else []).encode()
    names: list[str] = json.loads(team.broadcast(listed))
    files = {name: team.broadcast((saved.path / name).read_bytes() if saved else b"") for name in names}
    if team.is_first:
        return saved
    with tempfile.TemporaryDirectory(prefix="dualtune-") as scratch:
        copy = Path(scratch) / "checkpoint"
        write_directory(copy, files)
        return checkpoint.read(copy)
