"""trackio: on this machine, unless its own variables (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL) name another place."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence

import trackio

from dualtune.show.trackers.tracker import PROJECT, TrackedRow, TrackedRun


class ToTrackio:
    """A run of trackio's, by the name of ours with its id."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=PROJECT, name=f"{run.name}-{run.id}", config=dict(run.config), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:  # trackio takes no time: its rows have that of their sending
            self._run.log(dict(row.numbers), step=row.step)

    def close(self) -> None:
        self._run.finish()


open_tracker = ToTrackio
