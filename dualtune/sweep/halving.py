"""Successive halving: all runs are trained for a while, the better half twice as long, and so on.

Jamieson & Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016. A run that
goes on resumes exactly, so what is trained to the end is what `dualtune train` would have trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dualtune.errors import ConfigError
from dualtune.sweep.attempts import Attempts
from dualtune.sweep.scores import Score, result_of, score_of
from dualtune.sweep.trials import CheckedTrial, SweepTrial, have_same_eval
from dualtune.train.state.metrics import each_row
from dualtune.train.state.run_dir import METRICS, is_run_dir


class Rung(NamedTuple):
    """A step at which the runs are compared, and how many go on."""

    step: int
    kept: int


def rungs(num_runs: int, num_steps: int, every: int | None) -> list[Rung]:
    """Return the rungs: num_steps / 2, / 4, … until every run can be trained that far, in order of time.

    A rung is a multiple of `every`, the distance of evaluations: early stopping would see an additional one.
    """
    found: dict[int, int] = {}
    distance, num_rungs = every or 1, math.ceil(math.log2(num_runs))
    for rung in range(num_rungs):
        step = math.ceil(num_steps / 2 ** (num_rungs - rung) / distance) * distance
        if step < num_steps:
            found[step] = math.ceil(num_runs / 2 ** (rung + 1))
    return [Rung(step, kept) for step, kept in found.items()]


def halve(trials: Sequence[SweepTrial], plan: Sequence[Rung], attempt: Attempts, tell: Callable[[str], None]) -> None:
    """Train the trials by halving."""
    going = list(trials)
    for rung in plan:
        for trial in going:
            if not _has_reached(trial, rung.step):
                attempt(trial, f"up to step {rung.step}", rung.step)
        going = sorted(going, key=lambda trial: _score_at(trial, rung.step).order)[: rung.kept]
        names = ", ".join(trial.name for trial in going)
        tell(f"step {rung.step:<6} {len(going)} of {len(trials)} runs go on: {names}")
    for trial in going:
        attempt(trial, "to the end")


def check_comparable(checked: Sequence[CheckedTrial]) -> None:
    """Raise ConfigError unless the runs can be compared at the same step."""
    lengths = {each.num_steps for each in checked}
    if len(lengths) > 1:
        raise ConfigError(
            f"--halving: compares runs at the same step, but these have {min(lengths)} to {max(lengths)} steps. "
            "Set train.steps, or leave --halving out"
        )
    if len({each.trial.config.run.eval_every for each in checked}) > 1:
        raise ConfigError("--halving: compares runs at the same step, so run.eval_every must be the same in all")
    if not have_same_eval(checked):
        raise ConfigError("--halving: compares runs by their held-out rows, and these have different rows or tokens")


def _has_reached(trial: SweepTrial, step: int) -> bool:
    """Return whether a run has the evaluation after this step, or has ended before it."""
    return _score_at(trial, step).step >= step or result_of(trial).is_done


def _score_at(trial: SweepTrial, step: int) -> Score:
    return score_of(each_row(trial.path / METRICS), step) if is_run_dir(trial.path) else Score(None, 0)
