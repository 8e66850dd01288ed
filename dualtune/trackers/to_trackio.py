"""trackio: on this machine, unless its own variables (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL) name another place."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping

import trackio

from dualtune.trackers.tracker import PROJECT, TrackedRun


class ToTrackio:
    """A run of trackio's, by the name of ours with its id."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=PROJECT, name=f"{run.name}-{run.id}", config=dict(run.config), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


open_tracker = ToTrackio
