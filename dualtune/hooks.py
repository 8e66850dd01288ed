"""Hooks: how progress bars, profilers, trackers and outsiders watch a run. The trainer calls them in the given order.

A hook subclasses `Hook` and overrides the events that it wants. Records are immutable and hold plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Known before the first step."""

    run_dir: Path
    backend: str
    num_steps: int
    first_step: int  # steps done before, by the run that this one resumes
    num_train_documents: int
    num_eval_documents: int
    engine: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step: a row of metrics.jsonl."""

    step: int  # counted from 1
    epoch: float
    loss: float  # mean over the step's target tokens
    lr: float
    grad_norm: float  # before clipping
    num_targets: int
    num_tokens: int  # without padding
    step_s: float
    tokens_per_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class EvalRecord:
    step: int
    eval_loss: float  # mean over the target tokens of the evaluation set
    eval_targets: int


class Hook:
    """Override what you need; the rest does nothing."""

    def on_start(self, info: RunInfo) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...

    def on_eval_batch(self, done: int, total: int) -> None: ...

    def on_eval(self, record: EvalRecord) -> None: ...

    def on_end(self) -> None:
        """Called once, last, whether the run came to its end or failed."""
