"""TensorBoard: event files in the run directory, in `tensorboard`. Nothing leaves the machine."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dualtune.show.trackers.tracker import TrackedRow, TrackedRun


class ToTensorboard:
    """Writes each number as a scalar."""

    def __init__(self, run: TrackedRun) -> None:
        self._writer = EventFileWriter(str(run.directory / "tensorboard"))
        if not run.is_continued:  # TensorBoard then leaves out what an earlier training of this directory wrote
            self._writer.add_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))

    def log(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=number) for name, number in row.numbers.items()]
            self._writer.add_event(Event(step=row.step, wall_time=row.time_s, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


open_tracker = ToTensorboard
