"""Profile the memory of any loop, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable

from dualtune.backend import MemoryStats
from dualtune.profiler.analysis import SPIKE_MB, Leak, Peak, PhaseMemory, Spike, by_phase, find_leak, peak_of, spikes_in
from dualtune.profiler.process import process_memory
from dualtune.profiler.snapshot import Snapshot, to_csv
from dualtune.profiler.text import report


class MemoryProfiler:
    """Records a snapshot of the memory whenever it is told to; nothing is measured in between.

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
