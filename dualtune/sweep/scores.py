"""How good the runs of a sweep are, read from their directories: a sweep has no other state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualtune.sweep.trials import SweepTrial
from dualtune.train.health.score import Score
from dualtune.train.state.listing import RunSummary, summary_of
from dualtune.train.state.metrics import History, each_row
from dualtune.train.state.run_dir import METRICS, is_run_dir


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
    return Result(trial, summary_of(trial.path), score_of(each_row(trial.path / METRICS), best=best))


def score_of(rows: Iterable[Mapping[str, Any]], at: int | None = None, *, best: bool = False) -> Score:
    """Return the score after a step, or at the end. `best`: the run writes the weights of its best evaluation."""
    history = History(row for row in rows if at is None or row["step"] <= at)
    evals = {step: record.eval_loss for step, record in history.evals.items()}
    return Score.of(history.losses, evals, history.step or 0, best=best)


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
