"""A run as its files show it: read again and again, also over a network, and while it is killed or resumed.

Nothing is written, no lock is kept, and no model or backend is needed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from dualtune.base.errors import FormatError
from dualtune.base.untrusted import open_file
from dualtune.show.report.answers import sample
from dualtune.show.report.run_files import as_table, recorded_config, recorded_environment
from dualtune.show.view import run_view as rows
from dualtune.show.view.lines import RunLines
from dualtune.show.view.run_view import BETWEEN_STEPS, RunView
from dualtune.train.hooks import RunInfo
from dualtune.train.profiler.snapshot import parsed_timeline
from dualtune.train.state.listing import state_of
from dualtune.train.state.lock import read_note
from dualtune.train.state.metrics import row_of, time_of
from dualtune.train.state.run_dir import METRICS, SAMPLES, TIMELINE, check_is_run

MAX_BYTES = 1 << 30  # of a file that is followed
CHUNK = 1 << 23  # bytes that are read at once; a longer line is left out
TAIL = 1 << 20  # bytes of a file of which only the last part matters
DEFAULT_LOG_EVERY = 10


class Followed:
    """The lines that are added to a file. One that is replaced, as a resumed run does, is read from its start."""

    def __init__(self, path: Path, tail: int | None = None) -> None:
        """`tail`: begin at most this many bytes before the end."""
        self._path, self._tail = path, tail
        self._offset: int | None = None
        self._file: tuple[int, int] | None = None  # device and inode

    def new_lines(self) -> tuple[Iterator[str], bool]:
        """Return the whole lines since the last call, and whether they begin the file anew. FormatError if too large.

        The lines are read as they are taken, a part of the file at a time, and have to be taken to the end. A file that
        is absent has no lines.
        """
        if not os.path.lexists(self._path):
            return iter(()), False
        file = open_file(self._path, max_bytes=MAX_BYTES, is_own=True)
        status = os.fstat(file.fileno())
        is_new = self._offset is None or self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset
        if is_new:
            self._offset, self._file = self._start(status.st_size), (status.st_dev, status.st_ino)
        return self._lines(file), is_new

    def _lines(self, file: BufferedReader) -> Iterator[str]:
        with file:
            while (read := self._chunk(file)) is not None:
                yield from read

    def _start(self, size: int) -> int:
        return 0 if self._tail is None else max(0, size - self._tail)

    def _chunk(self, file: BufferedReader) -> list[str] | None:
        """Return the lines of the next part of the file; None at its last whole line."""
        file.seek(self._offset or 0)
        data = file.read(CHUNK)
        end = data.rfind(b"\n") + 1
        if not end and len(data) < CHUNK:
            return None
        self._offset = (self._offset or 0) + (end or len(data))
        return data[:end].decode("utf-8", errors="replace").splitlines()


class WatchedRun:
    """A run directory, read from the start to the present by `read`. The numbers are in `lines.view`."""

    def __init__(self, path: Path, say: Callable[[str, float], None], clock: Callable[[], float] = time.time) -> None:
        """`say(line, when)` gets what is new in the run since the first `read`; `when` in seconds since 1970."""
        check_is_run(path)
        self.path, self._say, self._clock = path, say, clock
        self.state, self.reason = "", ""
        self._metrics, self._samples = Followed(path / METRICS), Followed(path / SAMPLES)
        self._timeline = Followed(path / TIMELINE, tail=TAIL)
        self._last_phase_end = math.nan
        self._row_time = math.nan
        self._limit_bytes: int | None = None  # memory.limit, if it is set
        self._is_new = True
        self.lines = self._begin({}, {})

    def read(self) -> None:
        """Read what is new. FormatError if a file does not belong to a run; a damaged row is left out."""
        try:
            self._read()
        except OSError as error:
            raise FormatError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    @property
    def view(self) -> RunView:
        """The numbers of the run so far."""
        return self.lines.view

    @property
    def is_running(self) -> bool:
        """Return whether the run trains, as far as its files say."""
        return self.state == "running"

    @property
    def silent_s(self) -> float | None:
        """Return the seconds since the newest row; None before the first one."""
        return None if math.isnan(self._row_time) else max(0.0, self._clock() - self._row_time)

    def _read(self) -> None:
        lines, restarted = self._metrics.new_lines()
        if restarted:
            is_first, self._is_new = self._is_new, True
            self.lines = self._begin(recorded_config(self.path), recorded_environment(self.path))
            self._samples = Followed(self.path / SAMPLES)
            self._timeline, self._last_phase_end = Followed(self.path / TIMELINE, tail=TAIL), math.nan
            if not is_first:
                self._say("the run begins again, from a checkpoint or from its start", self._clock())
        for line in lines:
            if (row := row_of(line)) is not None:
                self._row_time = time_of(row) or self._row_time
                rows.tell(self.lines, row)
        for line in self._samples.new_lines()[0]:
            with suppress(FormatError):
                self.lines.on_sample(sample(line.encode(), SAMPLES))
        self._read_phases()
        self._read_state()
        self._is_new = False

    def _begin(self, config: Mapping[str, Mapping[str, Any]], environment: Mapping[str, Any]) -> RunLines:
        """Return an empty view for a config and an environment.json, whose values may be anything."""
        settings, train = config.get("run", {}), config.get("train", {})
        eval_every, save_every = (_count(settings.get(key)) for key in ("eval_every", "save_every"))
        view = RunView(eval_every, save_every, clock=lambda: self._row_time)
        if config.get("memory", {}).get("limit", "auto") != "auto":
            self._limit_bytes = _count(as_table(environment.get("memory")).get("available_bytes"))
        steps = _count(environment.get("num_steps")) or _count(train.get("steps")) or 0
        held_out = _count(as_table(environment.get("data")).get("eval_documents")) or 0
        view.on_start(RunInfo(self.path, "", steps, 0, 0, held_out, {}, 0))
        return RunLines(view, _count(settings.get("log_every")) or DEFAULT_LOG_EVERY, self._tell)

    def _tell(self, line: str) -> None:
        if not self._is_new:
            self._say(line, self._clock() if math.isnan(self._row_time) else self._row_time)

    def _read_phases(self) -> None:
        """Take the memory in use, and how long the phases between steps took, from the timeline."""
        for snapshot in parsed_timeline(f"{line}\n" for line in self._timeline.new_lines()[0]):
            before, self._last_phase_end = self._last_phase_end, snapshot.timestamp
            self.view.used_bytes = snapshot.used_bytes
            self.view.limit_bytes = self._limit_bytes or snapshot.total_bytes or None
            if snapshot.phase in BETWEEN_STEPS and not math.isnan(before):
                self.view.note_phase(snapshot.step, snapshot.phase, snapshot.timestamp - before, snapshot.timestamp)

    def _read_state(self) -> None:
        note, is_held = read_note(self.path)
        newest = rows.newest_checkpoint(self.path)
        self.view.saved = newest or self.view.saved
        self.state, self.reason = state_of(self.path, note, is_held, newest and newest[0])


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 53 else None
