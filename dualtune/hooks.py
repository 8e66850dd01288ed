"""Hooks: how progress bars, profilers and trackers watch a run.

A hook subclasses `Hook` and overrides the events that it wants. Records are immutable and hold plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Known before the first step."""

    run_dir: Path
    backend: str
    num_steps: int
    first_step: int  # steps done before a resume; 0 for a new run
    num_train_documents: int
    num_eval_documents: int
    engine: Mapping[str, Any]
    checkpoint_bytes: int  # on disk, each


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
    skipped: bool  # loss or gradient was not finite, so nothing was updated


@dataclass(frozen=True, slots=True)
class EvalRecord:
    step: int
    eval_loss: float  # mean over the target tokens of the evaluation set
    eval_targets: int


@dataclass(frozen=True, slots=True)
class Event:
    """An unusual event: a row of metrics.jsonl with the key `event` and the details as further keys."""

    step: int  # steps done
    event: (
        str  # resumed, config_changed, skipped_step, spike, rollback, save_failed, hook_failed, early_stop, verdict, …
    )
    message: str
    details: Mapping[str, Any] = field(default_factory=lambda: {})


class Hook:
    """Base class of hooks: override what you need; the rest does nothing.

    A hook that raises does not end the run: the failure is reported once, and the events that the hook missed are
    delivered again, in order, before the next event. (Only a non-`Exception`, such as KeyboardInterrupt, ends the run.)
    """

    def on_start(self, info: RunInfo) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...

    def on_eval_batch(self, done: int, total: int) -> None:
        """Called when an evaluation begins, with 0 done, and after each of its micro-batches."""

    def on_eval(self, record: EvalRecord) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def on_end(self) -> None:
        """Called once, at the end, whether the run succeeded or failed."""
