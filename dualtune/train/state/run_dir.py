"""A run directory: locked for one process, cleaned after a killed one, and searched for a checkpoint.

config.yaml         every key with its value
environment.json    versions and devices
chat_template.jinja the chat template, if any: data.template may name a file that another machine does not have
metrics.jsonl       steps, evaluations, events
memory.csv          the memory in use, by step and phase
checkpoints/        step-00000100, …
report.html         the page of `dualtune report`, written at the end
log.txt             what the terminal shows of a run, each line with its time
track-NAME.json     how far a tracker of run.track is; track-NAME.log: what it said
samples.jsonl       answers to run.sample_prompts, at each evaluation
predictions.jsonl   answers to the held-out prompts, by `dualtune eval`
adapter/            the result; with adapter.method: full it is in model/
lock                the current or last process, and how it ended
tinker.json         of a run of `dualtune serve --train` alone: its adapter
checkpoint-now      created by you: a checkpoint is saved after the step, and the file is removed
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DiskError, FormatError, Preempted
from dualtune.base.files import (
    OpenDirectory,
    check_own,
    did_you_mean_path,
    expanded,
    remove_leftovers,
    write_directory,
    write_file,
)
from dualtune.base.redaction import redact
from dualtune.base.untrusted import open_file
from dualtune.config import Config
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.lock import CLAIM_FILE, LOCK_FILE, Lock
from dualtune.train.state.metrics import MAX_BYTES
from dualtune.train.team import Team

# ----------------------------------------------------------------------------------------------------------------------
# The note between the process that trains and its parent, which restarts it after a signal has killed it.


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


# ----------------------------------------------------------------------------------------------------------------------
# The directory and its files.

CHECKPOINTS = "checkpoints"
ADAPTER, MODEL = "adapter", "model"
METRICS = "metrics.jsonl"
TIMELINE = "memory.csv"
REPORT = "report.html"
PREDICTIONS = "predictions.jsonl"
SAMPLES = "samples.jsonl"
ROLLOUTS = "rollouts.jsonl"  # of a run that learns from its own samples
BASE_FORMATS = "base_formats.json"  # what `dualtune quantize --compare` has measured
LOG = "log.txt"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
CHECKPOINT_NOW = "checkpoint-now"
TEMPLATE = "chat_template.jinja"
SERVED = "tinker.json"  # of a run of `dualtune serve --train`, which has its states in weights/NAME
FOLDERS = (CHECKPOINTS, ADAPTER, MODEL)
FILES = (
    LOCK_FILE, CLAIM_FILE, METRICS, TIMELINE, REPORT, PREDICTIONS, SAMPLES, ROLLOUTS, LOG, CONFIG, ENVIRONMENT,
    TEMPLATE, BASE_FORMATS,
)  # fmt: skip
RESUME = "auto, never, or the path of a checkpoint or a run directory"


@dataclass(slots=True)
class RunDir:
    """An opened run directory, and the checkpoint that the run resumes from."""

    path: Path
    saved: Checkpoint | None
    notes: list[str] = field(default_factory=lambda: [])  # on what was repaired when it was opened
    has_begun: bool = False  # whether it contains anything of this run
    records: dict[str, str] = field(default_factory=lambda: {})  # the files that record how it is trained
    lock: Lock | None = None  # if this process holds it
    opened: OpenDirectory | None = None

    def fault(self) -> str | None:
        """Return why the directory does not belong to this run any more; None while it does."""
        fault = self.opened.fault() if self.opened else None
        return fault or (self.lock.fault() if self.lock else None)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def result(self, config: Config) -> Path:
        """Return where the result is written: an adapter, or the model if that was trained."""
        return self.path / (MODEL if config.adapter.trains_model else ADAPTER)


@contextlib.contextmanager
def open_run(config: Config, resume: str = "auto") -> Generator[RunDir]:
    """Lock the run directory of a config and open it; meanwhile stop signals are handled.

    `resume`: "auto" resumes from the newest checkpoint that verifies, if there is one; "never" requires a new or empty
    directory; otherwise a path. Raises ConfigError, DiskError, FormatError (no checkpoint verifies) or LockedError.
    """
    path = path_of(config)
    try:
        check_usable(path, resume)
        created = [directory for directory in (path, *path.parents) if not directory.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"run.dir: {path} cannot be written: {error.strerror}") from error
    # From here on every way out, also a signal, either releases the lock with its reason or leaves nothing behind.
    run_dir, lock = RunDir(path, None), None

    def abandon() -> bool:
        """Leave the directory as it was, for a run that has not begun."""
        if lock is not None and not run_dir.has_begun:
            _leave(lock, run_dir, created, "preempted", "stopped before it began")
        return not run_dir.has_begun

    with interrupt.handled(abandon=abandon):
        lock, state, reason = Lock(path), "failed", "interrupted"
        try:
            removed = remove_leftovers(run_dir.path) + remove_leftovers(run_dir.checkpoints)
            run_dir.saved, problems = find_saved(run_dir.path, resume)
            notes = [f"removed {name}: incomplete, left by a run that was killed" for name in removed]
            run_dir.notes = notes + problems
            run_dir.lock, run_dir.opened = lock, OpenDirectory(path)
            yield run_dir
            state, reason = "done", ""
        except Preempted as stop:
            state, reason = "preempted", str(stop)
            raise
        except KeyboardInterrupt:
            raise interrupted(path) from None
        except Exception as error:
            reason = redact(f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        finally:
            if run_dir.opened:
                run_dir.opened.close()
            _leave(lock, run_dir, created, state, reason)


def _leave(lock: Lock, run_dir: RunDir, created: list[Path], state: str, reason: str) -> None:
    if run_dir.has_begun:
        lock.release(state, reason)
    elif _is_unused(run_dir.path):  # a run that failed before it wrote anything leaves nothing behind
        with contextlib.suppress(OSError):  # another process may have begun there
            lock.remove()
            for directory in created:
                directory.rmdir()
    else:
        lock.release_unused(state, reason)


def path_of(config: Config) -> Path:
    return expanded(config.run.dir)


def is_run_dir(path: Path) -> bool:
    return any((path / name).exists() for name in (LOCK_FILE, METRICS, CHECKPOINTS))


def served_run(path: Path) -> Path | None:
    """Return the run of `dualtune serve --train` that a directory is, or of which it is a state; None for any other."""
    return next((run for run in (path, path.parent.parent) if os.path.lexists(run / SERVED)), None)


def check_is_run(path: Path) -> None:
    """Raise ConfigError if a directory is not a run directory."""
    if not is_run_dir(path):
        nearest = "" if path.exists() else did_you_mean_path(path)
        if path.is_file() and any(map(is_run_dir, (path.parent, *path.parent.iterdir()))):
            nearest = f" but a file. Give its directory, {path.parent}"
        advice = nearest or ". To find run directories: dualtune runs DIRECTORY"
        raise ConfigError(f"{path}: is not a run directory{advice}")


def check_usable(path: Path, resume: str) -> None:
    """Raise ConfigError if the directory holds foreign files, or a run that must not be resumed."""
    check_own_files(path)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.dir: {path} is a file. Choose another with --set run.dir=…")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not is_run_dir(path):
        raise ConfigError(f"run.dir: {path} is not empty and holds no run. Choose another with --set run.dir=…")
    if served_run(path):
        raise ConfigError(f"run.dir: {path} {NOT_RESUMED.format(run=path)}")
    if resume == "never":
        raise ConfigError(
            f"run.dir: {path} already holds a run, and --resume never does not resume it. "
            "Choose another with --set run.dir=…"
        )


def check_own_files(path: Path) -> None:
    """Raise FormatError if a file or directory of the run is a link, a FIFO or anything else than what it is to be."""
    for name in (*FOLDERS, *FILES):
        check_own(path / name, stat.S_ISDIR if name in FOLDERS else stat.S_ISREG)
    for log in path.glob("track-*"):
        check_own(log, stat.S_ISREG)


NOT_RESUMED = (
    "is of `dualtune serve --train`, whose states have no place in any data. Start a new run from one: "
    "--set adapter.init_from={run}/weights/NAME --set adapter.init_optimizer=true --set run.dir=DIR"
)


def find_saved(path: Path, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to resume from, and the problems of newer ones. Changes nothing."""
    if resume == "never":
        return None, []
    if resume == "auto":
        return _newest(path / CHECKPOINTS)
    path = expanded(resume)
    for place in (path, path.parent.parent):  # RUN, RUN/weights/NAME, or a checkpoint in it
        if run := served_run(place):
            raise ConfigError(f"resume: got {resume!r}, which {NOT_RESUMED.format(run=run)}")
    if (path / checkpoint.MANIFEST).is_file():
        return checkpoint.read(path), []
    if (path / CHECKPOINTS).is_dir():
        saved, notes = _newest(path / CHECKPOINTS)
        if saved is not None:
            return saved, notes
    raise ConfigError(f"resume: got {resume!r}, which holds no checkpoint; allowed: {RESUME}")


def _newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    saved, problems = checkpoint.newest(directory)
    if saved is None and problems:
        listed = "\n".join(problems[:5])
        raise FormatError(
            f"no checkpoint in {directory} can be used:\n{listed}\nNothing was changed. Choose another run.dir to "
            "start over, or remove the directory."
        )
    return saved, [f"ignored the checkpoint {problem}" for problem in problems]


def interrupted(path: Path) -> KeyboardInterrupt:
    """Return the error of a run that a second Ctrl-C ends at once: what is kept of it, and how it goes on."""
    steps = checkpoint.steps(path / CHECKPOINTS)
    if not steps:
        return KeyboardInterrupt("There is no checkpoint yet: the same command starts again.")
    newest = checkpoint.path_of(path / CHECKPOINTS, steps[0])
    return KeyboardInterrupt(f"The newest checkpoint is {newest}. {Preempted.again}")


def _is_unused(path: Path) -> bool:
    try:
        return {entry.name for entry in path.iterdir()} <= {LOCK_FILE, CLAIM_FILE}
    except OSError:
        return False


# ----------------------------------------------------------------------------------------------------------------------
# A run directory shared by several processes: the first owns it, the others get copies of what they need.


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
