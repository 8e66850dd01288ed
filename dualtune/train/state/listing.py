"""Summaries of run directories, read without loading or changing anything."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from dualtune.base.errors import ConfigError, FormatError, LockedError
from dualtune.base.files import remove_directory
from dualtune.base.untrusted import read_json
from dualtune.train.state import checkpoint
from dualtune.train.state.lock import LOCK_FILE, Lock, LockRecord, read_note
from dualtune.train.state.metrics import History, each_row, main_rows, read_rows
from dualtune.train.state.resume import read_flat
from dualtune.train.state.run_dir import (
    ADAPTER,
    CHECKPOINTS,
    CONFIG,
    FILES,
    METRICS,
    check_is_run,
    check_own_files,
    is_run_dir,
)

MAX_METRICS_BYTES = 16 << 20
T = TypeVar("T", int, float)

MAX_DEPTH = 4  # of run directories below the given one


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A line of `dualtune runs`. None means unknown."""

    path: str
    state: str  # running, done, preempted, killed, failed or unreadable
    reason: str  # why it is not done, and what to do about it
    verdict: str | None = None  # one word
    step: int | None = None  # of the last step in metrics.jsonl
    num_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None  # of those after the first step
    model: str | None = None
    learning_rate: float | None = None
    start: str | None = None  # when it began, ISO 8601, if it runs, was killed, or its rows have the time
    date: str | None = None  # when it ended; if it is running or was killed, when it last wrote a row; ISO 8601
    seconds: float | None = None  # spent in steps; not summed for a very long file
    checkpoint: int | None = None  # step of the newest checkpoint; only `dualtune checkpoints` verifies


def list_runs(directory: Path) -> list[RunSummary]:
    """Return every run directory at or below a directory, by name; an unreadable one with the reason."""
    return [_summary(path) if problem is None else _unreadable(path, problem) for path, problem in _find(directory)]


def list_checkpoints(run_dir: Path) -> list[checkpoint.CheckpointEntry]:
    """Return every checkpoint of a run directory, verified, newest first."""
    check_is_run(run_dir)
    entries = checkpoint.entries(run_dir / CHECKPOINTS)
    best = best_of(run_dir, entries)
    return [replace(entry, is_best=entry.step == best) for entry in entries]


def best_of(run_dir: Path, entries: Sequence[checkpoint.CheckpointEntry]) -> int | None:
    """Return the step of the checkpoint with the best evaluation; None if none was evaluated."""
    evals = History(each_row(run_dir / METRICS)).evals
    judged = [e.step for e in entries if e.step in evals and math.isfinite(evals[e.step].eval_loss)]
    return min(judged, key=lambda step: evals[step].eval_loss, default=None)


def find_runs(directory: Path) -> list[Path]:
    """Return the run directories at or below a directory, by name; links are not followed. ConfigError without one."""
    return [path for path, problem in _find(directory) if problem is None]


def runs_at(path: Path) -> list[Path]:
    """Return a run directory itself, and for another directory the runs in it, such as those of a sweep."""
    return [path] if is_run_dir(path) or not path.is_dir() else find_runs(path) or [path]


def summary_of(run_dir: Path) -> RunSummary:
    """Return the summary of one run directory. ConfigError if it is none."""
    check_is_run(run_dir)
    return _summary(run_dir)


def _find(directory: Path, depth: int = MAX_DEPTH) -> Iterator[tuple[Path, str | None]]:
    """Yield (run directory, None), and (directory, why it cannot be read). ConfigError if there is no directory."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: this directory does not exist. Give the one that contains your run directories"
        )
    try:
        is_run = is_run_dir(directory)
        is_whole = is_run and (directory / CONFIG).exists()  # any program may name a file "lock"
        inner = [] if is_whole else sorted(p for p in directory.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError as error:
        yield directory, error.strerror or str(error)
        return
    if is_run:
        yield directory, None
    for path in inner if depth else ():
        yield from _find(path, depth - 1)


def _summary(path: Path) -> RunSummary:
    try:
        return _read_summary(path)
    except Exception as error:  # noqa: BLE001  one run must not hide the others; its row has the error
        return _unreadable(path, f"{type(error).__name__}: {error}")


def _unreadable(path: Path, problem: str) -> RunSummary:
    return RunSummary(str(path), "unreadable", problem)


def _read_summary(path: Path) -> RunSummary:
    rows, is_complete = rows_of(path)
    history = History(rows)
    steps = checkpoint.steps(path / CHECKPOINTS)
    newest = steps[0] if steps else None
    saved = {} if newest is None else _table(checkpoint.path_of(path / CHECKPOINTS, newest) / "state.json")
    note, is_held = read_note(path)
    state, reason = state_of(path, note, is_held, newest)
    # The best evaluation may be later than the newest checkpoint, or be only in the checkpoint.
    evals = [record.eval_loss for step, record in history.evals.items() if step > 0]
    evals = [*evals, _number(saved, "guards", "best_loss", float)]
    spent = [row["step_s"] for row in rows if type(row.get("step_s")) is float]
    config = read_flat(path)
    model, rate = config.get("model.name"), config.get("train.learning_rate")
    return RunSummary(
        path=str(path),
        state=state,
        reason=reason,
        verdict=history.verdict,
        step=history.step,
        num_steps=_number(saved, "schedule", "num_steps", int),
        loss=history.loss,
        eval_loss=history.eval_loss,
        best_eval_loss=min((loss for loss in evals if loss is not None and math.isfinite(loss)), default=None),
        model=model if isinstance(model, str) else None,
        learning_rate=float(rate) if isinstance(rate, int | float) and not isinstance(rate, bool) else None,
        start=_start(note, rows),
        date=_date(path, note, rows),
        seconds=math.fsum(spent) if spent and is_complete else None,
        checkpoint=newest,
    )


def state_of(path: Path, note: LockRecord | None, is_held: bool, newest: int | None) -> tuple[str, str]:
    """Return the state of a run, and why it is not done, from the note of its lock and its newest checkpoint."""
    if is_held:
        return "running", f"process {note.pid} on {note.host}" if note else ""
    if note is not None and note.state == "running" and note.host != socket.gethostname():
        return "running", f"process {note.pid} on {note.host}, by its note: its lock may not be visible from here"
    if note is None:
        problem = "it has no lock file" if not (path / LOCK_FILE).exists() else "its lock file cannot be read"
        return ("done", "") if (path / ADAPTER).exists() else ("failed", f"reason unknown: {problem}")
    if note.state == "running":
        effect = "starts it again" if newest is None else f"resumes it after step {newest}"
        return "killed", f"process {note.pid} on {note.host} was killed; the same command {effect}"
    if note.state not in ("done", "preempted", "failed"):
        return "failed", f"its lock file has an unknown state, {note.state!r}"
    return note.state, note.reason


def rows_of(run_dir: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows, and whether they are complete: of a very long file `main_rows`."""
    path = run_dir / METRICS
    is_short = not path.is_file() or path.stat().st_size <= MAX_METRICS_BYTES
    return (read_rows(path), True) if is_short else (main_rows(path), False)


def _start(note: LockRecord | None, rows: list[dict[str, Any]]) -> str | None:
    """Return when it began: a run that is over has replaced the note, so its first row says it."""
    written: Any = rows[0].get("time") if rows else None
    return _shown(_moment(written or (note.started if note is not None and note.state == "running" else None)))


def _date(path: Path, note: LockRecord | None, rows: list[dict[str, Any]]) -> str | None:
    """Return when it ended, or the last that is known of a run that has left no word about its end."""
    moments = [_moment(note.started)] if note is not None else []
    if note is None or note.state == "running":
        moments += [_moment(row.get("time")) for row in rows[-1:]]
    if (last := max(filter(None, moments), default=None)) is None and (path / METRICS).is_file():
        last = datetime.fromtimestamp((path / METRICS).stat().st_mtime, UTC)
    return _shown(last)


def _moment(text: object) -> datetime | None:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    return None


def _shown(moment: datetime | None) -> str | None:
    return moment and moment.isoformat(timespec="seconds")


def _number(table: Mapping[str, Any], section: str, key: str, kind: type[T]) -> T | None:
    inner = table.get(section)
    value: Any = cast("dict[str, Any]", inner).get(key) if isinstance(inner, dict) else None
    return kind(value) if type(value) in (int, kind) else None


def _table(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, max_bytes=checkpoint.MAX_STATE_BYTES, is_own=True)
    except FormatError:
        return {}


# ----------------------------------------------------------------------------------------------------------------------
# What can be deleted of runs that are over, and its deletion under the lock of each run.
#
# Checkpoints of finished runs, but not the last and not the one with the best evaluation; failed runs without any
# checkpoint or result. Links are never followed, and a directory that holds a link or something unknown is left alone.

# What a failed run without a checkpoint may consist of.
OF_A_FAILED_RUN = {CHECKPOINTS, *FILES}


@dataclass(frozen=True, slots=True)
class Deletable:
    """A directory that is not needed any more."""

    path: str
    run: str
    why: str
    num_bytes: int


def deletable(directory: Path) -> list[Deletable]:
    """Return what can be deleted at or below a directory. Changes nothing. ConfigError if there is no directory."""
    deletable: list[Deletable] = []
    for run in find_runs(directory):
        note, is_held = read_note(run)
        if note is not None and not is_held:
            deletable += _of_run(run, note.state)
    return deletable


def delete(entries: list[Deletable]) -> tuple[list[Deletable], list[str]]:
    """Delete these, and return them, and why others are left: a run that has been started meanwhile is left alone.

    What is still to be deleted is found again under the lock of the run. Raises DiskError.
    """
    done: list[Deletable] = []
    refusals: list[str] = []
    for run in dict.fromkeys(entry.run for entry in entries):
        try:
            lock = Lock(Path(run))
        except (FormatError, LockedError) as error:
            refusals.append(str(error))
            continue
        try:
            paths = {entry.path for entry in _of_run(Path(run), lock.before.state if lock.before else "")}
            for entry in (entry for entry in entries if entry.run == run):
                if entry.path in paths:
                    remove_directory(Path(entry.path))
                    done.append(entry)
                else:
                    refusals.append(f"{entry.path}: is needed now")
        finally:
            lock.release_unused("failed", "")
    return done, refusals


def _of_run(run: Path, state: str) -> list[Deletable]:
    try:
        check_own_files(run)
        if state == "done":
            return [*_old_checkpoints(run)]
    except FormatError:  # something in it is not what a run writes
        return []
    if state == "failed" and _is_worthless(run):
        return [Deletable(str(run), str(run), "a failed run without a checkpoint", _num_bytes(run))]
    return []


def _old_checkpoints(run: Path) -> Iterator[Deletable]:
    """Yield all checkpoints but the last and the best. None if one is damaged: then the others are its replacement."""
    entries = checkpoint.entries(run / CHECKPOINTS)
    if any(entry.problem or Path(entry.path).is_symlink() for entry in entries):
        return
    best = best_of(run, entries)
    for entry in entries[1:]:
        if entry.step != best:
            yield Deletable(entry.path, str(run), "neither the last nor the best checkpoint", entry.num_bytes)


def _is_worthless(run: Path) -> bool:
    names = {path.name for path in run.iterdir()}
    has_link = any(path.is_symlink() for path in run.iterdir())
    saved = run / CHECKPOINTS
    return names <= OF_A_FAILED_RUN and not has_link and not (saved.exists() and any(saved.iterdir()))


def _num_bytes(directory: Path) -> int:
    return sum(os.lstat(Path(at) / name).st_size for at, _, names in os.walk(directory) for name in names)
