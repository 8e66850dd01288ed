"""What a tracker is, and which there are. A new one is a file in this folder and a line in TRACKERS."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from dualtune.errors import EnvironmentFault

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
    """What a tracker is told of a run. Secrets are redacted."""

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
    module = importlib.import_module(f"dualtune.trackers.{kind.module}")
    return cast(Tracker, module.open_tracker(run))
