"""What predictive training did: counts, costs, and the speed-up from end to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dualtune.hybrid.phases import TrainingPhase


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step. Its loss and gradient norm are read late, so they are those of the last step that is known."""

    loss: float | None
    phase: TrainingPhase
    was_predicted: bool
    prediction_error: float | None  # |predicted − actual| / actual loss, of the last prediction
    confidence: float | None  # of the last attempt
    gradient_norm: float | None
    step_time_ms: float
    metrics: Mapping[str, float] = field(default_factory=lambda: {})  # further numbers


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened so far in the run, also before a resume. Whole numbers, so they are the same everywhere."""

    warmup: int = 0  # steps of data and schedule in each phase; predict: those that predictions stood for
    full: int = 0
    predict: int = 0
    correct: int = 0
    attempts: int = 0  # to predict
    accepted: int = 0
    undone: int = 0  # rolled back after their check
    virtual_steps: int = 0  # the steps that accepted predictions were worth, also those that skip none
    micro_corrections: int = 0  # probes inside a prediction, at multiples of the correction interval
    divergences: int = 0  # critical signals, and predictions that were undone
    probe_tokens: int = 0
    step_tokens: int = 0  # of the computed steps

    @property
    def computed(self) -> int:
        """The steps with a backward pass."""
        return self.warmup + self.full + self.correct

    @property
    def steps(self) -> int:
        """The steps of data and schedule."""
        return self.computed + self.predict

    def with_step(self, phase: TrainingPhase, num_tokens: int) -> Counts:
        """Return the counts after a computed step. One in `predict` is ordinary: its attempt was not accepted."""
        name = TrainingPhase.FULL if phase is TrainingPhase.PREDICT else phase
        return replace(self.plus(**{name.value: 1}), step_tokens=self.step_tokens + num_tokens)

    def plus(self, **more: int) -> Counts:
        """Return the counts with these numbers added."""
        return replace(self, **{name: getattr(self, name) + number for name, number in more.items()})

    def in_batches(self, tokens: int) -> float:
        """Return tokens as a share of the mean batch: the cost of their forward pass."""
        return tokens * self.computed / self.step_tokens if self.step_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds inside the steps of this process. They are reported, never stored, and decide nothing."""

    full_s: float = 0.0  # of ordinary steps in warmup and full, without a probe
    num_full: int = 0
    total_s: float = 0.0
    num_steps: int = 0  # of data and schedule

    def with_step(self, seconds: float, num_steps: int, is_full: bool) -> Clock:
        return Clock(
            self.full_s + seconds * is_full, self.num_full + is_full, self.total_s + seconds, self.num_steps + num_steps
        )

    @property
    def speedup(self) -> float | None:
        """The mean full step's time × the steps of the schedule ÷ the time they took; None if nothing was timed."""
        if not self.num_full or not self.total_s:
            return None
        return self.full_s / self.num_full * self.num_steps / self.total_s


@dataclass(frozen=True, slots=True)
class Statistics:
    """The report of a run. Costs are in forward passes of a batch."""

    counts: Counts
    step_cost: float
    wall_clock_speedup: float | None  # end to end, since this process began; evaluation and saving left out
    is_disabled: bool

    @property
    def cost(self) -> float:
        return self.counts.computed * self.step_cost + self.counts.in_batches(self.counts.probe_tokens)

    @property
    def cost_steps(self) -> float:
        """The cost in computed steps."""
        return self.cost / self.step_cost

    @property
    def cost_without(self) -> float:
        """The cost of the same schedule without prediction."""
        return self.counts.steps * self.step_cost

    @property
    def backward_reduction_pct(self) -> float:
        """The backward passes that were skipped, in percent of the steps."""
        return 100 * self.counts.predict / self.counts.steps if self.counts.steps else 0.0

    def shares(self) -> dict[str, float]:
        """Return the share of the steps in each phase."""
        return {phase: getattr(self.counts, phase) / max(1, self.counts.steps) for phase in TrainingPhase}

    def as_json(self) -> dict[str, Any]:
        """Return the statistics for metrics.jsonl."""
        counts = self.counts
        names = ("attempts", "accepted", "undone", "virtual_steps", "micro_corrections", "divergences")
        return {
            "phases": {phase.value: getattr(counts, phase) for phase in TrainingPhase},
            **{name: getattr(counts, name) for name in names},
            "backward_skipped": counts.predict,
            "backward_reduction_pct": self.backward_reduction_pct,
            "cost": self.cost,
            "cost_without": self.cost_without,
            "wall_clock_speedup": self.wall_clock_speedup,
            "disabled": self.is_disabled,
        }

    def table(self) -> str:
        """Return the table of the phases, and one line about predictions and costs.

        The speed-up by the clock is not in it: on a machine that gets less busy during the run it shows a gain that
        prediction has not made.
        """
        rows = [f"{phase:<8}{getattr(self.counts, phase):>8}{share:>8.1%}" for phase, share in self.shares().items()]
        counts = self.counts
        told = f"{counts.accepted} of {counts.attempts} predictions accepted, {counts.undone} undone"
        cost = f"cost {self.cost / self.cost_without:.3f} of the same schedule" if self.cost_without else "no cost"
        return "\n".join([f"{'phase':<8}{'steps':>8}{'share':>8}", *rows, f"{told}; {cost}"])
