"""Criteria of a run as data, what is observed of a run, how each criterion is measured, and the verdict as a row."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from types import MappingProxyType
from typing import Any, Literal

from dualtune.base.checks import Check, Level
from dualtune.base.errors import DualtuneError
from dualtune.base.text import in_time
from dualtune.doctor.validate.losses import decrease_of, largest_rise, window_means
from dualtune.train.hooks import StepRecord

Relation = Literal["==", "<=", "<", ">=", ">"]
Unit = Literal["count", "yes", "share", "bytes", "seconds", "number"]

_RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq, "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip

WARM_UP_STEPS = 20  # excluded from the throughput: kernels are chosen and compiled in the first steps
RATE_STEPS = 10  # throughput is measured over ten steps, as in a log line; for a single step it is mostly timing noise


@dataclass(frozen=True, slots=True)
class Criterion:
    """One number of a run, and its limit."""

    name: str
    measure: str  # a key of MEASURES
    relation: Relation
    limit: float
    unit: Unit = "count"
    needs_pretrained: bool = False  # only a pretrained model can meet it
    not_judged: str | None = None  # why the number is only shown here


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


class NotMeasured(Exception):
    """The run ended before there was enough to measure. The message says what is missing."""


def judge(criterion: Criterion, observed: Observed, *, random_weights: bool) -> Check:
    """Measure and compare. A criterion that cannot be measured is not met, unless random weights could not meet it."""
    if criterion.needs_pretrained and random_weights:
        reason = "random weights cannot meet it"
        return _row(criterion, "skipped", reason, None, reason)
    try:
        measured = MEASURES[criterion.measure](observed)
    except NotMeasured as reason:
        return _row(criterion, "fail", f"not measured: {reason}", None, str(reason))
    relation = "" if criterion.relation == "==" else f"{criterion.relation} "
    text = f"{shown(measured, criterion.unit)}, must be {relation}{shown(criterion.limit, criterion.unit)}"
    if criterion.not_judged is not None:
        return _row(criterion, "skipped", f"{text}; not judged: {criterion.not_judged}", measured, criterion.not_judged)
    is_met = _RELATIONS[criterion.relation](measured, criterion.limit)  # false for NaN
    return _row(criterion, "ok" if is_met else "fail", text, measured)


def _row(criterion: Criterion, level: Level, text: str, measured: float | None, note: str | None = None) -> Check:
    figures = {
        "measured": None if measured is None else finite(measured),
        "relation": criterion.relation,
        "limit": criterion.limit,
        "unit": criterion.unit,
        "note": note,
    }
    return Check(criterion.name, level, text, exit_code=DualtuneError.exit_code, figures=figures)


def finite(value: float) -> float | str:
    """Return a number that JSON has, or a text for one that it does not have."""
    return value if math.isfinite(value) else str(value)


def shown(value: float, unit: Unit) -> str:
    """Format a number for a reader."""
    match unit:
        case "yes":
            return "yes" if value else "no"
        case "share":
            return f"{100 * value:.1f} %"
        case "bytes":
            return f"{value / 1e6:,.1f} MB"
        case "seconds":
            return in_time(value, 1)
        case "count":
            return f"{value:.0f}"
        case "number":
            return f"{value:.3g}"


# --- measures --------------------------------------------------------------------------------------------------------


def _model_is_on_device(observed: Observed) -> float:
    if observed.engine is None:
        return 0.0
    device = str(observed.engine["device"]).partition(":")[0]  # cuda:0
    return float(device == observed.wanted_kind)


def _least_gradient(observed: Observed) -> float:
    norms = [step.grad_norm for step in _steps_of(observed)]
    return min(norms) if all(map(math.isfinite, norms)) else math.nan


def _unchanged_tensors(observed: Observed) -> float:
    if not observed.num_tensors:
        raise NotMeasured("no adapter was written")
    return len(observed.unchanged)


def _decrease(observed: Observed) -> float:
    _steps_of(observed, at_least=20)
    return decrease_of(observed.losses).share


def _rise(observed: Observed) -> float:
    _steps_of(observed, at_least=2 * observed.steps_per_window)
    return largest_rise(window_means(observed.losses, observed.steps_per_window))


def _growth(observed: Observed) -> float:
    """The growth of the memory in use, from the second window to the last; the first one has the initial allocations.

    The minimum of each window, because a step may be measured before its batch is freed; a leak raises the minimum too.
    """
    window = observed.steps_per_window
    _steps_of(observed, at_least=3 * window)
    before, after = min(observed.used_bytes[window : 2 * window]), min(observed.used_bytes[-window:])
    return (after - before) / before


def _spread(observed: Observed) -> float:
    """The coefficient of variation of the throughput: its standard deviation over its mean."""
    steps = _steps_of(observed, at_least=WARM_UP_STEPS + 2 * RATE_STEPS)[WARM_UP_STEPS:]
    groups = [steps[i : i + RATE_STEPS] for i in range(0, len(steps) - RATE_STEPS + 1, RATE_STEPS)]
    rates = [sum(s.num_tokens for s in group) / sum(s.step_s for s in group) for group in groups]
    return pstdev(rates) / fmean(rates)


def _missing_checkpoints(observed: Observed) -> float:
    if observed.save_every is None:
        raise NotMeasured("the config saves no checkpoints: run.save_every is null")
    due = range(observed.save_every, observed.num_steps + 1, observed.save_every)
    return len(set(due) - set(observed.saved_steps))


def _steps_of(observed: Observed, at_least: int = 1) -> Sequence[StepRecord]:
    if len(observed.steps) < at_least:
        raise NotMeasured(f"the run took {len(observed.steps)} steps, but this needs {at_least}")
    return observed.steps


def _weights(observed: Observed) -> Mapping[str, float]:
    if observed.engine is None:
        raise NotMeasured("the model was not loaded")
    if "adapted_weights" not in observed.engine:
        raise NotMeasured("the backend does not report how it stores the weights of the adapted layers")
    return observed.engine["adapted_weights"]


MEASURES: Mapping[str, Callable[[Observed], float]] = MappingProxyType(
    {
        "device_is_ready": lambda run: float(run.device_kind == run.wanted_kind),
        "model_is_on_device": _model_is_on_device,
        # A finite loss proves a forward pass; a finite gradient that is not zero proves a backward pass.
        "passes_ran": lambda run: float(any(math.isfinite(s.loss) and 0 < s.grad_norm < math.inf for s in run.steps)),
        "ran_to_the_end": lambda run: float(run.problem is None),
        "missing_steps": lambda run: run.num_steps - len(run.steps),
        "bad_losses": lambda run: sum(not math.isfinite(step.loss) for step in _steps_of(run)),
        "least_gradient": _least_gradient,
        "unchanged_tensors": _unchanged_tensors,
        "plain_layers": lambda run: _weights(run)["layers"] - _weights(run)["four_bit"],
        "bytes_per_weight": lambda run: _weights(run)["bytes"] / _weights(run)["parameters"],
        "peak_bytes": lambda run: run.peak_bytes if _steps_of(run) else 0,
        "elapsed": lambda run: run.elapsed_s,
        "decrease": _decrease,
        "rise": _rise,
        "growth": _growth,
        "spread": _spread,
        "missing_checkpoints": _missing_checkpoints,
    }
)
