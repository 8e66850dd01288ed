"""Profile the memory of any loop, step by step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dualtune.base.errors import DiskError
from dualtune.base.files import open_own
from dualtune.base.untrusted import open_file
from dualtune.engine.backend import MemoryStats
from dualtune.train.hooks import Hook, PhaseChange, RunInfo
from dualtune.train.profiler.analysis import (
    SPIKE_MB,
    Leak,
    Peak,
    PhaseMemory,
    Spike,
    by_phase,
    find_leak,
    peak_of,
    report,
    spikes_in,
)
from dualtune.train.profiler.snapshot import (
    MAX_ROW,
    OLD_HEADER,
    TIMELINE_HEADER,
    DeviceSample,
    Snapshot,
    device_reader,
    process_memory,
    process_reader,
    timeline_row,
    to_csv,
)


class MemoryProfiler:
    """Records a snapshot of the memory on request; nothing is measured in between.

    `source` returns the memory in use, such as `backend.memory`, or None where nothing can be read; then nothing is
    recorded. By default it is the memory of this process. It must not synchronize the device, and the one of a backend
    does not: the numbers are those of the allocator at this moment, while queued work may still run.
    """

    def __init__(self, source: Callable[[], MemoryStats | None] = process_memory) -> None:
        self._source = source
        self.snapshots: list[Snapshot] = []

    def start(self) -> None:
        """Forget what was recorded and begin."""
        self.snapshots = []

    def record_step(self, step: int, phase: str) -> Snapshot | None:
        """Record the memory in use now under a step and a phase of any name."""
        if (memory := self._source()) is None:
            return None
        self.snapshots.append(Snapshot(step, phase, memory.used_bytes, memory.total_bytes, time.time()))
        return self.snapshots[-1]

    @property
    def peak(self) -> Peak | None:
        """The highest use at a snapshot; None if there is none."""
        return peak_of(self.snapshots)

    def phases(self) -> dict[str, PhaseMemory]:
        return by_phase(self.snapshots)

    def spikes(self, threshold_mb: float = SPIKE_MB) -> list[Spike]:
        return spikes_in(self.snapshots, threshold_mb)

    def leak(self) -> Leak | None:
        return find_leak(self.snapshots)

    def generate_report(self) -> str:
        return report(self.snapshots)

    def export_csv(self) -> str:
        return to_csv(self.snapshots)


# ----------------------------------------------------------------------------------------------------------------------
# The timeline of a run: a snapshot at each boundary between two phases, written to the run directory.
#
# A number belongs to the phase that ends there. Taking it never synchronizes the device (docs/decisions/0006), so it is
# the view of the allocator when the host has queued the phase. On CUDA memory is allocated when work is queued, not
# when it runs, so the number is exact for this place in the program. MLX is lazy: it allocates when arrays are
# evaluated, which its engine starts once for each micro-batch and once for the update. Forward and backward pass cannot
# be told apart there, and work that is still being evaluated is counted in a later phase. What is allocated and freed
# between two boundaries shows only in the counter of the peak, which is exact on both.

START = "start"  # the phase before the first one: the model is loaded, nothing is trained yet
WITHOUT_DEVICE = ("data", "optimizer")  # phases in which the driver is not asked: once a step is enough
WRITE_EVERY = 4096  # characters
WRITE_EVERY_S = 2.0  # at the latest, in a run of long steps: `dualtune watch` reads the file
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT


class Timeline(Hook):
    """Writes a row for each phase of a run. A resumed run continues the file, without the rows that it repeats.

    A failure to write is reported like that of any hook, and the run continues.
    """

    def __init__(self, path: Path, memory: Callable[[], MemoryStats]) -> None:
        self._path, self._memory = path, memory
        self._process = process_reader()
        self._device: Callable[[], DeviceSample] | None = None
        self._header: Sequence[str] = TIMELINE_HEADER
        self._phase: tuple[int, str] = 0, START
        self._text = ""
        self._written = time.monotonic()
        self._file: int | None = None

    def on_start(self, info: RunInfo) -> None:
        self._phase = info.first_step, START
        self._device = device_reader(str(info.engine.get("device", "")))
        if self._file is None:
            self._file = open_own(self._path, _FLAGS)
        self._header = keep_rows(self._file, self._path, info.first_step)

    def on_phase_change(self, change: PhaseChange) -> None:
        self._sample()
        self._phase = change.step, change.phase
        if len(self._text) > WRITE_EVERY or time.monotonic() - self._written > WRITE_EVERY_S:
            self._write()

    def on_end(self) -> None:
        if self._file is None:
            return
        try:
            self._sample()
            self._write()
        finally:
            os.close(self._file)
            self._file = None

    def _sample(self) -> None:
        """Note the memory in use at the end of the current phase."""
        (step, phase), memory = self._phase, self._memory()
        device = self._device() if self._device and phase not in WITHOUT_DEVICE else None
        self._text += timeline_row(
            Snapshot(
                step, phase, memory.used_bytes, memory.total_bytes, time.time(), memory.peak_bytes, memory.cached_bytes,
                self._process(), device and device.used_bytes, device and device.percent, device and device.power_w,
            ), self._header,
        )  # fmt: skip

    def _write(self) -> None:
        text, self._text, self._written = self._text, "", time.monotonic()
        if self._file is None:
            return
        try:
            os.write(self._file, text.encode())
        except OSError as error:
            reason = error.strerror or error
            raise DiskError(f"{self._path}: rows of the memory in use are not written: {reason}") from error


def keep_rows(file: int, path: Path, first_step: int) -> Sequence[str]:
    """Cut the file after the last whole row of a step up to `first_step`; write the header if nothing remains.

    Return the columns of the file.
    """
    size, columns = 0, TIMELINE_HEADER
    lines = {(",".join(header) + "\n").encode(): header for header in (TIMELINE_HEADER, OLD_HEADER)}
    with open_file(path, is_own=True) as rows:
        if first_step and (header := lines.get(rows.readline(MAX_ROW))):
            size, columns = rows.tell(), header
            while (row := rows.readline(MAX_ROW)).endswith(b"\n") and _step_of(row) <= first_step:
                size = rows.tell()
    os.ftruncate(file, size)
    if not size:
        os.write(file, (",".join(columns) + "\n").encode())
    return columns


def _step_of(row: bytes) -> float:
    """Return the step of a row; a damaged row counts as later than every step."""
    step = row.partition(b",")[0]
    return int(step) if step.isdigit() else float("inf")
