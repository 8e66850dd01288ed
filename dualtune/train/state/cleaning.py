"""What can be deleted of runs that are over, and its deletion under the lock of each run.

Checkpoints of finished runs, but not the last and not the one with the best evaluation; failed runs without any
checkpoint or result. Links are never followed, and a directory that holds a link or something unknown is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dualtune.errors import LockedError
from dualtune.io.disk import remove_directory
from dualtune.train.state import checkpoint
from dualtune.train.state.listing import best_of, find_runs
from dualtune.train.state.lock import CLAIM_FILE, LOCK_FILE, Lock, read_note
from dualtune.train.state.run_dir import (
    BASE_FORMATS,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    LOG,
    METRICS,
    PREDICTIONS,
    REPORT,
    SAMPLES,
    TIMELINE,
)

# What a failed run without a checkpoint may consist of.
OF_A_FAILED_RUN = {
    BASE_FORMATS,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    TIMELINE,
    REPORT,
    PREDICTIONS,
    SAMPLES,
    LOG,
    LOCK_FILE,
    CLAIM_FILE,
    "chat_template.jinja",
}


@dataclass(frozen=True, slots=True)
class Deletable:
    """A directory that is not needed any more."""

    path: str
    run: str
    why: str
    num_bytes: int


def deletable(directory: Path) -> list[Deletable]:
    """Return what can be deleted at or below a directory. Changes nothing. ConfigError if there is no directory."""
    found: list[Deletable] = []
    for run in find_runs(directory):
        note, is_held = read_note(run)
        if note is not None and not is_held:
            found += _of_run(run, note.state)
    return found


def delete(entries: list[Deletable]) -> tuple[list[Deletable], list[str]]:
    """Delete these, and return them, and why others are left: a run that has been started meanwhile is left alone.

    What is still to be deleted is found again under the lock of the run. Raises DiskError.
    """
    done: list[Deletable] = []
    left: list[str] = []
    for run in dict.fromkeys(entry.run for entry in entries):
        try:
            lock = Lock(Path(run))
        except LockedError as error:
            left.append(str(error))
            continue
        try:
            known = {entry.path for entry in _of_run(Path(run), lock.before.state if lock.before else "")}
            for entry in (entry for entry in entries if entry.run == run):
                if entry.path in known:
                    remove_directory(Path(entry.path))
                    done.append(entry)
                else:
                    left.append(f"{entry.path}: is needed now")
        finally:
            lock.release_unused("failed", "")
    return done, left


def _of_run(run: Path, state: str) -> Iterator[Deletable]:
    if (run / CHECKPOINTS).is_symlink():
        return
    if state == "done":
        yield from _old_checkpoints(run)
    if state == "failed" and _is_worthless(run):
        yield Deletable(str(run), str(run), "a failed run without a checkpoint", _num_bytes(run))


def _old_checkpoints(run: Path) -> Iterator[Deletable]:
    """Yield all checkpoints but the last and the best. None if one is damaged: then the others are its replacement."""
    found = checkpoint.entries(run / CHECKPOINTS)
    if any(entry.problem or entry.path.is_symlink() for entry in found):
        return
    best = best_of(run, found)
    for entry in found[1:]:
        if entry.step != best:
            yield Deletable(str(entry.path), str(run), "neither the last nor the best checkpoint", entry.num_bytes)


def _is_worthless(run: Path) -> bool:
    names = {path.name for path in run.iterdir()}
    has_link = any(path.is_symlink() for path in run.iterdir())
    saved = run / CHECKPOINTS
    return names <= OF_A_FAILED_RUN and not has_link and not (saved.exists() and any(saved.iterdir()))


def _num_bytes(directory: Path) -> int:
    return sum(os.lstat(Path(at) / name).st_size for at, _, names in os.walk(directory) for name in names)
