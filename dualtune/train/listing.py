"""What run directories hold, told without loading or changing anything."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualtune.errors import ConfigError
from dualtune.train import checkpoint
from dualtune.train.lock import read_note
from dualtune.train.metrics import History, last_rows, read_rows
from dualtune.train.run_dir import ADAPTER, CHECKPOINTS, METRICS, is_run_dir

MAX_DEPTH = 4  # of run directories below the one that is asked about


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A line of `dualtune runs`."""

    path: str
    state: str  # running, done, preempted or failed
    reason: str  # why it was preempted or failed
    step: int | None  # of the last step in metrics.jsonl
    num_steps: int | None
    loss: float | None
    eval_loss: float | None
    checkpoint: int | None  # step of the newest checkpoint; not verified, which takes `dualtune checkpoints`


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A line of `dualtune checkpoints`."""

    path: str
    step: int
    num_bytes: int
    problem: str | None
    is_best: bool


def list_runs(directory: Path) -> list[RunSummary]:
    """Every run directory at or below a directory, by name."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such directory. Give the one that holds your run directories")
    return [_summary(path) for path in _find(directory, MAX_DEPTH)]


def list_checkpoints(run_dir: Path) -> list[CheckpointSummary]:
    """Every checkpoint of a run directory, verified, newest first."""
    if not is_run_dir(run_dir):
        raise ConfigError(f"{run_dir}: is not a run directory. `dualtune runs` lists those below a directory")
    found = checkpoint.entries(run_dir / CHECKPOINTS)
    evals = History(read_rows(run_dir / METRICS)).evals
    judged = [e.step for e in found if e.step in evals and math.isfinite(evals[e.step].eval_loss)]
    best = min(judged, key=lambda step: evals[step].eval_loss, default=None)
    return [CheckpointSummary(str(e.path), e.step, e.num_bytes, e.problem, e.step == best) for e in found]


def _find(directory: Path, depth: int) -> Iterator[Path]:
    if is_run_dir(directory):
        yield directory
    elif depth:
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.is_symlink():
                yield from _find(path, depth - 1)


def _summary(path: Path) -> RunSummary:
    state, reason = _state_of(path)
    history = History(last_rows(path / METRICS))
    newest = checkpoint.steps(path / CHECKPOINTS)[:1]
    saved = _state(checkpoint.path_of(path / CHECKPOINTS, newest[0])) if newest else {}
    return RunSummary(
        str(path), state, reason,
        history.step,
        _num_steps(saved),
        history.loss,
        history.eval_loss,
        newest[0] if newest else None,
    )  # fmt: skip


def _state_of(path: Path) -> tuple[str, str]:
    note, held = read_note(path)
    if held:
        return "running", f"process {note.pid} on {note.host}" if note else ""
    if note is None:
        return ("done", "") if (path / ADAPTER).exists() else ("failed", "it has no lock file to tell why")
    if note.state == "running":
        return "failed", f"process {note.pid} on {note.host} was killed"
    return note.state, note.reason


def _num_steps(state: Mapping[str, Any]) -> int | None:
    schedule = state.get("schedule")
    found = cast("dict[str, Any]", schedule).get("num_steps") if isinstance(schedule, dict) else None
    return found if isinstance(found, int) else None


def _state(path: Path) -> dict[str, Any]:
    try:
        state: Any = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", state) if isinstance(state, dict) else {}
