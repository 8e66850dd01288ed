"""Observations of a tier's run: from a hook during training, and from the files that it leaves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.adapter.formats.directory import read_adapter
from dualtune.adapter.spec import init_adapter, modules_of, tensor_name
from dualtune.backend import Backend
from dualtune.config import Config
from dualtune.hooks import Hook, RunInfo, StepRecord
from dualtune.train.state import checkpoint
from dualtune.train.state.run_dir import CHECKPOINTS


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything about a run that criteria may use. Tuples have an entry per step that was taken."""

    device_kind: str  # "cuda", "metal" or "cpu"
    wanted_kind: str  # of the requested device
    num_steps: int  # requested
    save_every: int | None
    steps_per_window: int  # 50, or fewer where the run has fewer steps than the tier's config
    steps: tuple[StepRecord, ...] = ()
    used_bytes: tuple[int, ...] = ()  # of device memory, after the step
    before_bytes: int = 0  # on a CPU, the process's memory before any model was loaded; elsewhere 0
    engine: Mapping[str, Any] | None = None  # Engine.description, once the model was loaded
    num_tensors: int = 0  # of the adapter
    unchanged: tuple[str, ...] = ()  # tensors that are bitwise equal to their first values
    saved_steps: tuple[int, ...] = ()  # steps with a checkpoint that verifies
    elapsed_s: float = 0.0
    problem: str | None = None  # what ended the run early

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def peak_bytes(self) -> int:
        """Peak device memory after the first step, which compiles; on a CPU, the memory that the process used for it.

        Of a run of one step, that step's.
        """
        later = self.steps[1:] or self.steps
        return max(0, max((step.peak_bytes for step in later), default=0) - self.before_bytes)


class Watch(Hook):
    """Keeps the records of a run, with the memory in use after each step. A step without record was not taken.

    The peak of memory is counted anew after the first record: the first step compiles, and to choose among kernels
    Inductor times them with a buffer as large as the GPU's second cache, which no later step allocates.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._start = time.perf_counter()
        self.info: RunInfo | None = None
        self.steps: list[StepRecord] = []
        self.used_bytes: list[int] = []

    def on_start(self, info: RunInfo) -> None:
        self.info = info

    def on_step(self, record: StepRecord) -> None:
        if not self.steps:
            self._backend.reset_peak_memory()
        self.steps.append(record)
        self.used_bytes.append(self._backend.memory().used_bytes)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was created."""
        return time.perf_counter() - self._start


def unchanged_tensors(adapter_dir: Path, config: Config) -> tuple[int, tuple[str, ...]]:
    """Return the number of the adapter's tensors, and the names of those that still have their initial values."""
    trained = read_adapter(adapter_dir).tensors
    shapes = {
        module: (trained[tensor_name(module, "B")].shape[0], trained[tensor_name(module, "A")].shape[1])
        for module in modules_of(trained)
    }
    initial = init_adapter(shapes, config.adapter.rank, config.run.seed, method=config.adapter.method)
    return len(trained), tuple(name for name, tensor in initial.items() if np.array_equal(tensor, trained[name]))


def verified_checkpoints(run_dir: Path) -> tuple[int, ...]:
    """Return the steps of complete checkpoints: every file has the size and sha256 of its manifest."""
    directory = run_dir / CHECKPOINTS
    found = checkpoint.entries(directory) if directory.is_dir() else []
    return tuple(sorted(entry.step for entry in found if entry.problem is None))
