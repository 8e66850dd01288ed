"""What predictive training remembers between steps, and how a checkpoint holds it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import SupportsFloat

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from dualtune.adapter.spec import Tensors
from dualtune.backend import OptimizerState, StepOutput
from dualtune.hybrid.economics import Economics
from dualtune.hybrid.monitor import Monitor
from dualtune.hybrid.phases import Stage
from dualtune.hybrid.statistics import Counts
from dualtune.hybrid.vectors import flatten, split
from dualtune.hybrid.velocity import Window
from dualtune.policy import PolicyState

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


_NUMBERS = TypeAdapter(Numbers)


@dataclass(frozen=True, slots=True)
class Known:
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
    output: StepOutput | Known | None = None  # of the last computed step, on the device, not read yet
    confidence: float | None = None  # of the last attempt
    prediction_error: float | None = None  # of the last prediction

    def as_state(self) -> PolicyState:
        """Return the state for a checkpoint; empty before the first step. Reads the output."""
        if self.start is None:
            return PolicyState()
        output = self.output and (_finite(self.output.loss), _finite(self.output.grad_norm))
        numbers = Numbers(
            self.stage, self.monitor, self.economics, self.counts, self.attempt,
            self.window.half if self.window else None, self.snapshot.optimizer.step if self.snapshot else None,
            output, self.confidence, self.prediction_error,
        )  # fmt: skip
        tensors = {
            f"{part} {name}": tensor for part, found in self._parts(self.start) for name, tensor in found.items()
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
    parts = _tensors_by_part(state.tensors)
    if _START not in parts:
        raise ValueError("the weights that the run began with are missing")
    window = snapshot = None
    if numbers.window_half is not None:
        first_P, middle_P, slope_P = (_vector(parts, part) for part in (_FIRST, _MIDDLE, _SLOPE))
        if first_P is None:
            raise ValueError("the weights of its window are missing")
        window = Window(numbers.window_half, first_P, middle_P, slope_P)
    if numbers.optimizer_step is not None:
        slots = {part.removeprefix(f"{_SLOT} "): found for part, found in parts.items() if part.startswith(_SLOT)}
        snapshot = ReturnPoint(parts.get(_WEIGHTS, {}), OptimizerState(numbers.optimizer_step, slots))
    if (numbers.attempt is None) != (snapshot is None):
        raise ValueError("a prediction that waits for its check needs a snapshot")
    output = None if numbers.output is None else Known(*(math.nan if x is None else x for x in numbers.output))
    return Memory(
        numbers.economics, numbers.stage, numbers.monitor, numbers.counts, parts[_START], window,
        numbers.attempt, snapshot, output, numbers.confidence, numbers.prediction_error,
    )  # fmt: skip


def _tensors_by_part(tensors: Tensors) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        part, _, own = name.rpartition(" ")
        found.setdefault(part, {})[own] = tensor
    return found


def _vector(parts: Mapping[str, Tensors], part: str) -> np.ndarray | None:
    return flatten(parts[part]) if part in parts else None


def _finite(value: SupportsFloat) -> float | None:
    return float(value) if math.isfinite(float(value)) else None
