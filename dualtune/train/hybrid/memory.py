"""What predictive training remembers between steps, and how a checkpoint holds it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from dualtune.engine.backend import OptimizerState, StepOutput
from dualtune.model.adapter import Tensors
from dualtune.train.hybrid.monitor import Monitor, Stage, TrainingPhase
from dualtune.train.hybrid.prediction import Economics, Window, flatten, split
from dualtune.train.policy import PolicyState

# ----------------------------------------------------------------------------------------------------------------------
# What predictive training did: counts, costs, and the speed-up from end to end.


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
    undone_steps: int = 0  # of them, those that were rolled back
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

    @property
    def progress(self) -> int:
        """The steps that are in the weights: computed, or predicted and not undone."""
        return self.computed + self.virtual_steps - self.undone_steps

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
    """Seconds inside the steps of this process, without its first one, which may compile.

    They are in no checkpoint: the next process may run on another machine. What it stores is `extra`.
    """

    full_s: float = 0.0  # of ordinary steps in warmup and full that read no weights and probe nothing
    num_full: int = 0
    total_s: float = 0.0
    num_steps: int = 0  # of data and schedule
    progress: int = 0  # as of `Counts`

    def with_step(self, seconds: float, num_steps: int, progress: int, is_full: bool) -> Clock:
        return Clock(
            self.full_s + seconds * is_full, self.num_full + is_full, self.total_s + seconds,
            self.num_steps + num_steps, self.progress + progress,
        )  # fmt: skip

    @property
    def extra(self) -> float:
        """The time beyond that of full steps with the same progress, in full steps; negative: less time."""
        return self.total_s * self.num_full / self.full_s - self.progress if self.full_s else 0.0

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
    gate: str = "none"  # hybrid.gate
    extra_steps: float = 0.0  # by the clock, of all processes of the run: see `Clock.extra`
    closed_at: int | None = None  # the steps done when the clock ended predictions

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

    @property
    def slower_pct(self) -> float:
        """How much slower the run was by the clock than full steps with the same progress, in percent of their time."""
        return 100 * self.extra_steps / self.counts.progress if self.counts.progress else 0.0

    @property
    def verdict(self) -> str:
        """What the gate has done: none, open or closed."""
        return "none" if self.gate == "none" else "open" if self.closed_at is None else "closed"

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
            "gate": self.verdict,
            "slower_pct": self.slower_pct,
        }

    def table(self) -> str:
        """Return the table of the phases, and one line about predictions and costs.

        The speed-up by the clock is not in it: on a machine that gets less busy during the run it shows a gain that
        prediction has not made.
        """
        rows = [f"{phase:<8}{getattr(self.counts, phase):>8}{share:>8.1%}" for phase, share in self.shares().items()]
        counts = self.counts
        outcome = f"{counts.accepted} of {counts.attempts} predictions accepted, {counts.undone} undone"
        cost = f"cost {self.cost / self.cost_without:.3f} of the same schedule" if self.cost_without else "no cost"
        lines = [f"{'phase':<8}{'steps':>8}{'share':>8}", *rows, f"{outcome}; {cost}"]
        if self.closed_at is not None:
            slower = f"the run was {self.slower_pct:.1f} % slower"
            lines.append(f"switched off by the clock at step {self.closed_at}: {slower}")
        return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# The memory of the policy, and its form in a checkpoint.

_START, _FIRST, _MIDDLE, _SLOPE, _WEIGHTS, _SLOT = "start", "first", "middle", "slope", "weights", "slot"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction that waits for its check, or a series of them."""

    jumps: int  # accepted in a row
    steps: int  # that they stand for
    probe_tokens: int
    check_losses: tuple[float, ...]  # of the second probe set, before it
    predicted_loss: float | None  # of the next computed step; None: compared already
    is_critical: bool = False  # a critical signal was seen since


@dataclass(frozen=True, slots=True)
class ReturnPoint:
    """Where a prediction that hurts is undone to. Both are exactly what the engine gave."""

    weights: Tensors
    optimizer: OptimizerState


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a checkpoint holds of the numbers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    stage: Stage
    monitor: Monitor
    economics: Economics
    counts: Counts
    attempt: Prediction | None
    window_half: int | None
    optimizer_step: int | None  # of the snapshot
    output: tuple[float | None, float | None] | None  # loss and gradient norm of the last step; None: not finite
    confidence: float | None
    prediction_error: float | None
    extra_steps: float = 0.0


_NUMBERS = TypeAdapter(Numbers)


@dataclass(frozen=True, slots=True)
class RestoredOutput:
    """A step's output in a resumed run."""

    loss: SupportsFloat
    grad_norm: SupportsFloat


@dataclass(frozen=True, slots=True)
class Memory:
    """The state between two steps. It is replaced whole, so that a step that is interrupted leaves it as it was."""

    economics: Economics
    stage: Stage
    monitor: Monitor = field(default_factory=Monitor)
    counts: Counts = field(default_factory=Counts)
    start: Tensors | None = None  # the weights that the run began with; None: no step was taken
    window: Window | None = None
    attempt: Prediction | None = None
    snapshot: ReturnPoint | None = None  # with an attempt
    output: StepOutput | RestoredOutput | None = None  # of the last computed step, on the device, not read yet
    confidence: float | None = None  # of the last attempt
    prediction_error: float | None = None  # of the last prediction
    extra_steps: float = 0.0  # of the processes before this one: see `Clock.extra`; 0 without a gate

    def as_state(self) -> PolicyState:
        """Return the state for a checkpoint; empty before the first step. Reads the output."""
        if self.start is None:
            return PolicyState()
        output = self.output and (_finite(self.output.loss), _finite(self.output.grad_norm))
        numbers = Numbers(
            self.stage, self.monitor, self.economics, self.counts, self.attempt,
            self.window.half if self.window else None, self.snapshot.optimizer.step if self.snapshot else None,
            output, self.confidence, self.prediction_error, self.extra_steps,
        )  # fmt: skip
        tensors = {
            f"{part} {name}": tensor for part, named in self._parts(self.start) for name, tensor in named.items()
        }
        return PolicyState(_NUMBERS.dump_python(numbers, mode="json"), tensors)

    def _parts(self, start: Tensors) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
        window = self.window
        yield _START, start
        vectors = {
            _FIRST: window and window.first_P,
            _MIDDLE: window and window.middle_P,
            _SLOPE: window and window.slope_P,
        }
        yield from ((part, split(vector_P, start)) for part, vector_P in vectors.items() if vector_P is not None)
        if self.snapshot is not None:
            yield _WEIGHTS, self.snapshot.weights
            yield from ((f"{_SLOT} {slot}", tensors) for slot, tensors in self.snapshot.optimizer.slots.items())


def from_state(state: PolicyState) -> Memory:
    """Return what `Memory.as_state` has stored. ValueError if it does not belong to predictive training."""
    numbers = _NUMBERS.validate_python(dict(state.values))
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in state.tensors.items():
        part, _, own = name.rpartition(" ")
        parts.setdefault(part, {})[own] = tensor
    if _START not in parts:
        raise ValueError("the weights that the run began with are missing")
    window = snapshot = None
    if numbers.window_half is not None:
        first_P, middle_P, slope_P = (
            flatten(parts[part]) if part in parts else None for part in (_FIRST, _MIDDLE, _SLOPE)
        )
        if first_P is None:
            raise ValueError("the weights of its window are missing")
        window = Window(numbers.window_half, first_P, middle_P, slope_P)
    if numbers.optimizer_step is not None:
        slots = {part.removeprefix(f"{_SLOT} "): tensors for part, tensors in parts.items() if part.startswith(_SLOT)}
        snapshot = ReturnPoint(parts.get(_WEIGHTS, {}), OptimizerState(numbers.optimizer_step, slots))
    if (numbers.attempt is None) != (snapshot is None):
        raise ValueError("a prediction that waits for its check needs a snapshot")
    output = None if numbers.output is None else RestoredOutput(*(math.nan if x is None else x for x in numbers.output))
    return Memory(
        numbers.economics, numbers.stage, numbers.monitor, numbers.counts, parts[_START], window,
        numbers.attempt, snapshot, output, numbers.confidence, numbers.prediction_error, numbers.extra_steps,
    )  # fmt: skip


def _finite(value: SupportsFloat) -> float | None:
    return float(value) if math.isfinite(float(value)) else None
