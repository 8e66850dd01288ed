"""What a tracker is, and which there are. A new one is a file in this folder and a line in TRACKERS."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from dualtune.base.errors import EnvironmentFault
from dualtune.base.files import open_own
from dualtune.train.hooks import Hook, RunInfo

PROJECT = "dualtune"


class TrackedRow(NamedTuple):
    """The numbers of a step or of an evaluation."""

    step: int
    time_s: float  # when it was done, seconds since 1970
    numbers: Mapping[str, float]


class Tracker(Protocol):
    """A run of a tracker that is open. Any error of a method is tried again later."""

    def log(self, rows: Sequence[TrackedRow]) -> None:
        """Add rows, at most `TrackerKind.rows_at_once`. After an error, the same rows come again."""
        ...

    def close(self) -> None:
        """Send what waits."""
        ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker gets it. Secrets are redacted."""

    directory: Path
    name: str
    id: str  # the same whenever the run is continued
    config: Mapping[str, Any]  # key -> value, as JSON has it
    is_continued: bool


class TrackerKind(NamedTuple):
    """Where a tracker comes from."""

    module: str  # has the function `open_tracker`, from a TrackedRun to a Tracker
    package: str  # what it imports
    install: str  # what pip installs
    rows_at_once: int = 1  # that one request takes, all of them or none
    quiet: Mapping[str, str] = {}  # variables, unless the user has set them: the package sends nothing about itself


TRACKERS = {
    "trackio": TrackerKind("to_trackio", "trackio", "trackio"),
    "wandb": TrackerKind("to_wandb", "wandb", "wandb", quiet={"WANDB_ERROR_REPORTING": "false"}),
    "mlflow": TrackerKind("to_mlflow", "mlflow", "mlflow", 50, {"MLFLOW_DISABLE_TELEMETRY": "true"}),
    "tensorboard": TrackerKind("to_tensorboard", "tensorboard", "tensorboard"),
}


def check_installed(names: Iterable[str]) -> None:
    """Raise EnvironmentFault, with the command that helps, if a tracker's package is missing."""
    for name in names:
        if importlib.util.find_spec(TRACKERS[name].package) is None:
            raise EnvironmentFault(
                f"run.track: {name} is not installed. To install it: pip install {TRACKERS[name].install}"
            )


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    kind = TRACKERS[name]
    for variable, value in kind.quiet.items():  # read when the package is imported
        os.environ.setdefault(variable, value)
    module = importlib.import_module(f"dualtune.show.trackers.{kind.module}")
    return cast(Tracker, module.open_tracker(run))


# ----------------------------------------------------------------------------------------------------------------------
# The hook that starts a process for each tracker of a run, and ends it with the run.

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
WAIT_S = 30  # at the end of the run, for the last rows of all trackers


class TrackerProcesses(Hook):
    """Starts `dualtune.show.trackers.send` for each name. A process that fails or hangs does not affect the run.

    The process sees the end of the run, however it comes, because its standard input ends.
    """

    def __init__(self, run: Path, names: Sequence[str]) -> None:
        self._run, self._names = run, names
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def on_start(self, info: RunInfo) -> None:
        for name in self._names:
            if name in self._processes:  # an event that has failed is sent again
                continue
            # -P: no module of the current directory, which may hold anybody's files, is imported
            command = [sys.executable, "-P", "-m", "dualtune.show.trackers.send", str(self._run), name]
            command += ["--new"] if info.first_step == 0 else []
            with os.fdopen(open_own(self._run / f"track-{name}.log", _FLAGS), "ab") as log:
                self._processes[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )

    def on_end(self) -> None:
        """Wait a moment for the last rows. EnvironmentFault, which is shown as an event, says what is left."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        failed, slow, ends = list[str](), list[str](), time.monotonic() + WAIT_S
        for name, process in self._processes.items():
            try:
                if process.wait(max(0.0, ends - time.monotonic())) != 0:
                    failed.append(name)
            except subprocess.TimeoutExpired:
                slow.append(name)
        self._processes.clear()
        problems = [f"{name} is still sending, in a process of its own" for name in slow]
        problems += [
            f"{name}: not all was sent, see {self._run / f'track-{name}.log'}. "
            f"To send the rest: dualtune track {self._run} --to {name}"
            for name in failed
        ]
        if problems:
            raise EnvironmentFault("; ".join(problems))
