"""Guards: what a run does when its numbers go wrong.

Every decision is a function of the losses so far, and the state is saved in checkpoints, so a resumed run decides like
the uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dualtune.base.errors import NonFiniteError
from dualtune.config import Config
from dualtune.train.hooks import EvalRecord, Event, StepRecord

WINDOW = 64  # number of losses that a spike is compared with
MIN_LOSSES = 16  # with fewer, the variation of the losses is unknown


@dataclass(slots=True)
class GuardState:
    """The state of the guards in a checkpoint, as JSON values."""

    losses: list[float] = field(default_factory=lambda: [])
    in_spike: bool = False
    nonfinite_in_a_row: int = 0
    num_skipped: int = 0
    rollback_to: int | None = None  # the last rollback: its checkpoint…
    rollback_at: int = 0  # …and the step of the spike
    eval_step: int = 0  # of the newest evaluation that counted
    best_step: int | None = None
    best_loss: float | None = None
    evals_since_best: int = 0


class Guards:
    """Checks steps and evaluations. `sources(step)` returns the rows of a step, counted from 1, as path:line."""

    def __init__(self, config: Config, sources: Callable[[int], list[str]], state: Mapping[str, Any] | None) -> None:
        self._config = config.guards
        self._sources = sources
        self.state = GuardState(**(state or {}))
        self.spike_step: int | None = None  # set while a rollback is due
        self._unrewarded = False  # whether the last step that was skipped had answers without any reward

    @property
    def stops_early(self) -> bool:
        limit = self._config.early_stopping
        return limit is not None and self.state.evals_since_best >= limit

    def on_step(self, record: StepRecord) -> Event | None:
        """Return an event if the step is unusual."""
        if record.skipped:
            return self._on_nonfinite(record)
        self.state.nonfinite_in_a_row = 0
        return self._on_loss(record)

    def check(self, num_steps: int) -> None:
        """Raise NonFiniteError if too many steps in a row were skipped, or all `num_steps` of the run."""
        in_a_row, limit = self.state.nonfinite_in_a_row, self._config.nonfinite_limit
        if in_a_row <= limit and in_a_row < num_steps:
            return
        had = "had a loss or gradient that is not finite"
        advice = "Check the data rows listed above, lower train.learning_rate, or use model.dtype: float32"
        if self._unrewarded:
            had, advice = "had no reward", "The events reward_failed, above and in metrics.jsonl, say why"
        which = f"{in_a_row} steps in a row {had}; guards.nonfinite_limit is {limit}"
        if in_a_row == num_steps:
            which = f"all {num_steps} steps of the run {had}" if num_steps > 1 else f"the only step of the run {had}"
        raise NonFiniteError(f"{which}. None of them changed the weights. {advice}")

    def on_eval(self, record: EvalRecord) -> bool:
        """Record an evaluation, and return whether it is the best so far. The base model's (step 0) does not count."""
        state = self.state
        if record.step <= state.eval_step:
            return False
        state.eval_step = record.step
        is_best = math.isfinite(record.eval_loss) and (state.best_loss is None or record.eval_loss < state.best_loss)
        if is_best:
            state.best_step, state.best_loss, state.evals_since_best = record.step, record.eval_loss, 0
        else:
            state.evals_since_best += 1
        return is_best

    def may_return_to(self, step: int) -> bool:
        """Return whether to roll back to a checkpoint: if a spike follows a rollback, its checkpoint was too late."""
        state = self.state
        return state.rollback_to is None or step < state.rollback_to or step > state.rollback_at

    def rolled_back(self, to: int, at: int, state: Mapping[str, Any]) -> None:
        """Restore the state from the checkpoint at step `to`, after a spike at step `at`."""
        num_skipped = self.state.num_skipped
        self.state = GuardState(**state)
        self.state.rollback_to, self.state.rollback_at, self.state.num_skipped = to, at, num_skipped

    def _on_nonfinite(self, record: StepRecord) -> Event:
        self.state.nonfinite_in_a_row += 1
        self.state.num_skipped += 1
        rows = self._sources(record.step)
        listed = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
        self._unrewarded = record.metrics.get("failed_rewards") == 1.0
        why = f"loss {record.loss}, gradient norm {record.grad_norm}"
        if self._unrewarded:
            why = "no answer has a reward"
        return Event(
            record.step,
            "skipped_step",
            f"step {record.step}: {why}: skipped, the weights are unchanged. Its data rows: {listed}",
            {"rows": rows},
        )

    def _on_loss(self, record: StepRecord) -> Event | None:
        state, config = self.state, self._config
        score = robust_z(record.loss, state.losses)
        state.losses = [*state.losses, record.loss][-WINDOW:]
        was_in_spike, state.in_spike = state.in_spike, score > config.spike_threshold
        if not state.in_spike or was_in_spike or config.on_spike == "ignore":
            return None
        text = (
            f"step {record.step}: loss {record.loss:.4f} is {score:.1f} robust standard deviations above the median "
            "of recent steps"
        )
        details: dict[str, Any] = {"score": score, "rows": self._sources(record.step)}
        if config.on_spike == "rollback":
            self.spike_step = record.step
        return Event(record.step, "spike", text, details)


def robust_z(value: float, history: list[float]) -> float:
    """Return how many robust standard deviations `value` is above the median of a history; 0 while that is short.

    The modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): 1.4826 · MAD estimates the
    standard deviation and is robust to outliers. A lower bound prevents large scores for a flat history.
    """
    if len(history) < MIN_LOSSES:
        return 0.0
    center = median(history)
    mad = median(abs(x - center) for x in history)
    return (value - center) / max(1.4826 * mad, 0.01 * abs(center), 1e-6)
