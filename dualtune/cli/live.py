"""The live line of `dualtune validate`: where a tier stands. On a terminal it stays one line; elsewhere, ten in all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, TextColumn

from dualtune.backend import MemoryStats
from dualtune.hooks import Hook, RunInfo, StepRecord

LINES = 10


def live_hook(name: str, memory: Callable[[], MemoryStats], tell: Callable[[str], None]) -> Hook:
    return OneLine(name, memory) if sys.stdout.isatty() else TenLines(name, memory, tell)


class TenLines(Hook):
    """A line for each tenth of the steps."""

    def __init__(self, name: str, memory: Callable[[], MemoryStats], tell: Callable[[str], None]) -> None:
        self._name, self._memory, self._tell = name, memory, tell
        self._start = time.perf_counter()
        self._num_steps = 0

    def on_start(self, info: RunInfo) -> None:
        self._num_steps = info.num_steps

    def on_step(self, record: StepRecord) -> None:
        if record.step % max(1, self._num_steps // LINES) == 0 or record.step == self._num_steps:
            self._tell(self._line(record))

    def _line(self, record: StepRecord) -> str:
        return (
            f"{self._name:<11} step {record.step:>4}/{self._num_steps}  loss {record.loss:.4f}  "
            f"{record.tokens_per_s:,.0f} tokens/s  memory {self._memory().used_bytes / 1e6:,.1f} MB  "
            f"{time.perf_counter() - self._start:.1f} s"
        )


class OneLine(TenLines):
    """One line that is written over at every step, without colours."""

    def __init__(self, name: str, memory: Callable[[], MemoryStats]) -> None:
        super().__init__(name, memory, lambda line: None)
        columns = TextColumn("{task.description}", markup=False, style="none")
        self._progress = Progress(columns, console=Console(highlight=False, no_color=True), transient=True)
        self._task = self._progress.add_task(f"{name:<11} loading")
        self._progress.start()

    def on_step(self, record: StepRecord) -> None:
        self._progress.update(self._task, description=self._line(record))

    def on_end(self) -> None:
        self._progress.stop()
