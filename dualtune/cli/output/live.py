"""The progress of a tier of `dualtune validate`: on a terminal in the live line, elsewhere in ten lines."""

from __future__ import annotations

from collections.abc import Callable

from dualtune.backend import MemoryStats
from dualtune.cli.output.screen import Phases
from dualtune.hooks import Hook, RunInfo, StepRecord
from dualtune.text.show import in_time

LINES = 10


class TierShown(Hook):
    def __init__(self, name: str, memory: Callable[[], MemoryStats], shown: Phases) -> None:
        self._name, self._memory, self._shown = name, memory, shown
        self._num_steps = 0
        shown.begin("running", name)

    def on_start(self, info: RunInfo) -> None:
        self._num_steps = info.num_steps

    def on_step(self, record: StepRecord) -> None:
        loss, speed = f"loss {record.loss:.4f}", f"{record.tokens_per_s:,.0f} tokens/s"
        memory = f"memory {self._memory().used_bytes / 1e6:,.1f} MB"
        if self._shown.is_live:
            return self._shown.update(record.step, self._num_steps, (loss,), (memory,), (speed,))
        if record.step % max(1, self._num_steps // LINES) == 0 or record.step == self._num_steps:
            self._shown.tell(
                f"{self._name:<11} step {record.step:>4}/{self._num_steps}  {loss}  {speed}  {memory}  "
                f"{in_time(self._shown.seconds, 1)}"
            )
        return None
