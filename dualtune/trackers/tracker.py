"""What a tracker is, and which there are. A new one is a file in this folder and a line in TRACKERS."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from dualtune.errors import EnvironmentFault

PROJECT = "dualtune"


class Tracker(Protocol):
    """A run of a tracker that is open. Any error of a method is tried again later."""

    def log(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step. `time_s`: when it was done, seconds since 1970. The same step may come twice."""
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
    config: Mapping[str, str]  # key -> value, as in config.yaml
    is_continued: bool


class TrackerKind(NamedTuple):
    """Where a tracker comes from."""

    module: str  # has the function `open_tracker`, from a TrackedRun to a Tracker
    package: str  # what it imports
    install: str  # what pip installs


TRACKERS = {
    "trackio": TrackerKind("to_trackio", "trackio", "trackio"),
    "wandb": TrackerKind("to_wandb", "wandb", "wandb"),
    "mlflow": TrackerKind("to_mlflow", "mlflow", "mlflow"),
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
    module = importlib.import_module(f"dualtune.trackers.{TRACKERS[name].module}")
    return cast(Tracker, module.open_tracker(run))
