"""How good the runs of a sweep are, read from their directories: a sweep has no other state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dualtune.sweep.trials import SweepTrial
from dualtune.train.state.listing import RunSummary, summary_of
from dualtune.train.state.metrics import History, read_rows
from dualtune.train.state.run_dir import METRICS, is_run_dir

LAST_SHARE = 10  # without held-out rows, the last tenth of the steps is averaged


@dataclass(frozen=True, slots=True)
class Score:
    """The loss by which a run is compared, in nats per token: of held-out rows, or else of the last tenth of its steps.

    None: the run has none that is finite.
    """

    loss: float | None
    step: int  # after which it was measured

    @property
    def order(self) -> tuple[bool, float]:
        """What scores of one step are sorted by: the lowest loss first, what has none last."""
        return (self.loss is None, 0.0 if self.loss is None else self.loss)


@dataclass(frozen=True, slots=True)
class Result:
    """A run of a sweep: what it tried, how far it is, and its score."""

    trial: SweepTrial
    summary: RunSummary | None  # None: it has not begun
    score: Score

    @property
    def is_done(self) -> bool:
        """Return whether it was trained to its end."""
        return self.summary is not None and self.summary.state == "done"


def result_of(trial: SweepTrial) -> Result:
    """Return the result of a run so far, from its directory."""
    if not is_run_dir(trial.path):
        return Result(trial, None, Score(None, 0))
    best = trial.config.guards.restore_best
    return Result(trial, summary_of(trial.path), score_of(read_rows(trial.path / METRICS), best=best))


def score_of(rows: Iterable[Mapping[str, Any]], at: int | None = None, *, best: bool = False) -> Score:
    """Return the score after a step, or the last one. `best`: of the best evaluation, whose weights the run writes."""
    history = History(row for row in rows if at is None or row["step"] <= at)
    evals = {step: record.eval_loss for step, record in history.evals.items() if step > 0}
    if evals:
        finite = {step: loss for step, loss in evals.items() if math.isfinite(loss)}
        step = min(finite, key=lambda each: finite[each]) if best and finite else max(evals)
        return Score(finite.get(step), step)
    if not history.losses:
        return Score(None, 0)
    loss = fmean(history.losses[-max(1, len(history.losses) // LAST_SHARE) :])
    return Score(loss if math.isfinite(loss) else None, history.step or 0)


def ranked(results: Sequence[Result]) -> list[Result]:
    """Return the results, best first: the finished ones by their loss, then those that came furthest."""

    def order(result: Result) -> tuple[bool, int, tuple[bool, float]]:
        return (not result.is_done, 0 if result.is_done else -result.score.step, result.score.order)

    return sorted(results, key=order)


def at_the_edge(best: SweepTrial, trials: Sequence[SweepTrial]) -> list[str]:
    """Say which values of the best run are the lowest or highest of those that were tried, of three or more."""
    found: list[str] = []
    for key, value in best.values.items():
        tried = {float(other) for trial in trials if _is_number(other := trial.values.get(key, ""))}
        if len(tried) >= 3 and value in (min(tried), max(tried)):
            side = "lowest" if value == min(tried) else "highest"
            found.append(f"the best {key}, {value:g}, is the {side} that was tried: try {side[:-3]}er ones")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
