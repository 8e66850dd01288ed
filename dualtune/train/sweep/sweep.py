"""A sweep from its command line to its last run."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dualtune.base.errors import ConfigError, DualtuneError, LockedError, NonFiniteError, OutOfMemory, Paused
from dualtune.base.files import check_own
from dualtune.config import Config
from dualtune.data.documents import Show
from dualtune.engine.backend import Backend
from dualtune.model.base_model import resolve_model
from dualtune.model.config_file import read_config
from dualtune.train.health import Score, scored_loss
from dualtune.train.prepare import prepare
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.listing import RunSummary, summary_of
from dualtune.train.state.metrics import History, each_row
from dualtune.train.state.resume import as_recorded, effective_changes, table
from dualtune.train.state.run_dir import METRICS, check_usable, find_saved, is_run_dir, path_of
from dualtune.train.sweep.values import (
    Choices,
    Range,
    Values,
    default_rates,
    grid,
    names_of,
    overrides_of,
    read_values,
    sampler,
)

# ----------------------------------------------------------------------------------------------------------------------
# The runs of a sweep: each a config with a directory of its own, checked before the first one is trained.


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """A run of a sweep."""

    name: str
    values: Values
    config: Config

    @property
    def path(self) -> Path:
        """The run directory."""
        return path_of(self.config)


@dataclass(frozen=True, slots=True)
class CheckedTrial:
    """What the checks of a trial have found."""

    trial: SweepTrial
    num_steps: int
    has_eval: bool
    eval_documents: str  # their fingerprint
    memory: list[str]  # the lines of its estimate


def check(trial: SweepTrial, backend: Backend, show: Show) -> CheckedTrial:
    """Check a trial as `dualtune train --dry-run` does. A DualtuneError names the trial."""
    try:
        check_own(trial.path, stat.S_ISDIR)  # a link in the sweep's directory may lead anywhere
        check_usable(trial.path, "auto")
        saved, _ = find_saved(trial.path, "auto")
        if saved is not None:
            _check_same(saved, trial.config)
        prepared = prepare(trial.config, backend, saved, show)
    except DualtuneError as error:
        raise type(error)(f"{trial.name}: {error}") from error
    return CheckedTrial(
        trial, prepared.data.order.num_steps, len(prepared.data.eval) > 0, prepared.fingerprints["eval documents"],
        prepared.memory.lines(),
    )  # fmt: skip


def _check_same(saved: Checkpoint, config: Config) -> None:
    """Raise ConfigError if a run began with other values: it would be trained with both, and not be comparable."""
    if changes := effective_changes(saved, as_recorded(saved, config)):
        raise ConfigError(
            f"{saved.path}: was trained with other values, so it is not a run of this sweep.\n{table(changes)}\n"
            "Give these values again, or another directory: --dir DIR"
        )


def why_not_comparable(checked: Sequence[CheckedTrial]) -> str | None:
    """Return why the losses of these runs do not say which is best; None if they do."""
    if len({one.eval_documents for one in checked}) > 1:
        return "they have different held-out rows or tokens"
    if len({scored_loss(one.trial.config.model_dump(), held_out=one.has_eval) for one in checked}) > 1:
        return "their losses are different ones (train.objective and its settings)"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# How good the runs of a sweep are, read from their directories: a sweep has no other state.


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
    notes: list[str] = []
    for key, value in best.values.items():
        tried = {float(other) for trial in trials if _is_number(other := trial.values.get(key, ""))}
        if len(tried) >= 3 and value in (min(tried), max(tried)):
            side = "lowest" if value == min(tried) else "highest"
            notes.append(f"the best {key}, {value:g}, is the {side} that was tried: try {side[:-3]}er ones")
    return notes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ----------------------------------------------------------------------------------------------------------------------
# Training the runs of a sweep: what ends one of them, and what ends them all.

Train = Callable[[SweepTrial, int | None], object]  # up to a step, or to the end


class Attempts:
    """Trains one run after another. A run that diverges or needs too much memory does not end the sweep.

    Every other error does, and so does a stop signal; the same command then resumes where it was.
    """

    def __init__(self, train: Train, tell: Callable[[str], None]) -> None:
        self._train, self._tell = train, tell
        self.failure: DualtuneError | None = None  # of the last run that failed

    def __call__(self, trial: SweepTrial, note: str, pause_after: int | None = None) -> None:
        """Train a run, up to a step or to its end. `note` says which of how many it is."""
        self._tell(f"run         {trial.name} ({note})")
        try:
            self._train(trial, pause_after)
        except Paused:
            pass
        except (NonFiniteError, OutOfMemory) as error:
            self.failure = type(error)(str(error))  # without the frames of the run, which hold its engine
            self._tell(f"failed      {str(error).splitlines()[0]}; the sweep continues with the other runs")
        score = result_of(trial).score
        if score.loss is not None:
            self._tell(f"loss        {score.loss:.4f} after step {score.step}")

    def or_leave(self, trial: SweepTrial, note: str) -> None:
        """Train a run, unless another process does: several can share a grid, each with a GPU of its own."""
        try:
            self(trial, note)
        except LockedError as error:
            self._tell(f"left        {str(error).splitlines()[0]}")


# ----------------------------------------------------------------------------------------------------------------------
# Successive halving: all runs are trained for a while, the better half twice as long, and so on.
#
# Jamieson & Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016. A run
# that goes on resumes exactly, so what is trained to the end is what `dualtune train` would have trained.


class Rung(NamedTuple):
    """A step at which the runs are compared, and how many continue."""

    step: int
    num_runs: int


def rungs(num_runs: int, num_steps: int, every: int | None) -> list[Rung]:
    """Return the rungs: num_steps / 2, / 4, … until every run can be trained that far, in order of time.

    A rung is a multiple of `every`, the distance of evaluations: early stopping would see an additional one.
    """
    counts: dict[int, int] = {}
    distance, num_rungs = every or 1, math.ceil(math.log2(num_runs))
    for rung in range(num_rungs):
        step = math.ceil(num_steps / 2 ** (num_rungs - rung) / distance) * distance
        if step < num_steps:
            counts[step] = math.ceil(num_runs / 2 ** (rung + 1))
    return [Rung(step, count) for step, count in counts.items()]


def halve(trials: Sequence[SweepTrial], plan: Sequence[Rung], attempt: Attempts, tell: Callable[[str], None]) -> None:
    """Train the trials by halving."""
    going = list(trials)
    for rung in plan:
        for trial in going:
            # It has the evaluation of this step, or has ended before it.
            if _score_at(trial, rung.step).step < rung.step and not result_of(trial).is_done:
                attempt(trial, f"up to step {rung.step}", rung.step)
        going = sorted(going, key=lambda trial: _score_at(trial, rung.step).order)[: rung.num_runs]
        names = ", ".join(trial.name for trial in going)
        tell(f"step {rung.step:<6} {len(going)} of {len(trials)} runs continue: {names}")
    for trial in going:
        attempt(trial, "to the end")


def check_comparable(checked: Sequence[CheckedTrial]) -> None:
    """Raise ConfigError unless the runs can be compared at the same step."""
    lengths = {one.num_steps for one in checked}
    if len(lengths) > 1:
        raise ConfigError(
            f"--halving: compares runs at the same step, but these have {min(lengths)} to {max(lengths)} steps. "
            "Set train.steps, or leave --halving out"
        )
    if len({one.trial.config.run.eval_every for one in checked}) > 1:
        raise ConfigError("--halving: compares runs at the same step, so run.eval_every must be the same in all")


def _score_at(trial: SweepTrial, step: int) -> Score:
    return score_of(each_row(trial.path / METRICS), step) if is_run_dir(trial.path) else Score(None, 0)


# ----------------------------------------------------------------------------------------------------------------------
# The plan of a sweep: its runs from a command line, their check, and their training.

MakeConfig = Callable[[Sequence[str]], Config]  # from overrides


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep tries, and how."""

    varied: Sequence[Choices | Range]
    make: MakeConfig  # from the overrides of one run, beside those that all share
    directory: Path  # of the run directories
    num_chosen: int | None = None  # runs whose values a sampler chooses; None: the whole grid
    halving: bool = False

    def trials(self) -> list[SweepTrial]:
        """Return the runs of the grid; with a sampler, those with the first and with the last values, to be checked."""
        choices = [setting for setting in self.varied if isinstance(setting, Choices)]
        if self.num_chosen is None:
            return self._named(grid(choices))
        return self._named([{setting.key: setting.ends[end] for setting in self.varied} for end in (0, 1)])

    def trial(self, values: Values) -> SweepTrial:
        """Return the run with these values, named without regard to others."""
        return self._named([values])[0]

    def _named(self, runs: Sequence[Values]) -> list[SweepTrial]:
        return [
            SweepTrial(name, values, self.make([*overrides_of(values), f"run.dir={self.directory / name}"]))
            for values, name in zip(runs, names_of(runs), strict=True)
        ]


def make_plan(
    overrides: Sequence[str], make: MakeConfig, directory: Path | None, num_chosen: int | None, halving: bool
) -> SweepPlan:
    """Return the plan of a command line. ConfigError for what cannot be tried, or not in that way."""
    fixed, varied = read_values(overrides)

    def make_one(of_run: Sequence[str]) -> Config:
        return make([*fixed.values(), *of_run])

    # The first run is loaded at once: a mistake in the config is an error of it, not of each run.
    first = make_one(overrides_of({setting.key: setting.ends[0] for setting in varied}))
    if not varied:
        if "train.learning_rate" in fixed:
            raise ConfigError(
                "--set train.learning_rate: has one value. Give several, as in --set train.learning_rate=1e-4,1e-3, or "
                "none for the default grid; another key is tried with its own values"
            )
        varied = [default_rates(first, read_config(resolve_model(first.model.name, weights=False)))]
    if num_chosen is None and (ranges := [setting.key for setting in varied if isinstance(setting, Range)]):
        raise ConfigError(f"--set {ranges[0]}: a range needs --trials N; a grid has values, such as 1e-5,1e-4,1e-3")
    if num_chosen is not None and halving:
        raise ConfigError("--halving is for a grid, and --trials chooses values one after another. Leave one out")
    place = directory or path_of(first).with_name(f"{path_of(first).name}-sweep")
    if is_run_dir(place) or (place.exists() and not place.is_dir()):
        kind = "a run directory" if place.is_dir() else "a file"
        raise ConfigError(f"--dir: {place} is {kind}. Choose another directory, in which the runs of the sweep lie")
    return SweepPlan(varied, make_one, place, num_chosen, halving)


def check_plan(plan: SweepPlan, backend: Backend, show: Show) -> list[CheckedTrial]:
    """Check every run that is known, before the first one is trained."""
    checked = [check(trial, backend, show) for trial in plan.trials()]
    if plan.halving:
        check_comparable(checked)
    if (plan.halving or plan.num_chosen is not None) and (reason := why_not_comparable(checked)):
        option = "--halving" if plan.halving else "--trials"
        raise ConfigError(f"{option}: chooses between runs by their losses, but {reason}. Leave {option} out")
    return checked


def carry_out(
    plan: SweepPlan, checked: Sequence[CheckedTrial], attempt: Attempts, tell: Callable[[str], None]
) -> list[SweepTrial]:
    """Train the runs of a plan, and return them. What is finished already stays as it is."""
    if plan.num_chosen is not None:
        return _search(plan, plan.num_chosen, checked[0].trial.config.run.seed, attempt)
    trials = [one.trial for one in checked]
    if plan.halving:
        every = trials[0].config.run.eval_every if checked[0].has_eval else None
        halve(trials, rungs(len(trials), checked[0].num_steps, every), attempt, tell)
    else:
        for number, trial in enumerate(trials, start=1):
            attempt.or_leave(trial, f"{number} of {len(trials)}")
    return trials


def _search(plan: SweepPlan, num_runs: int, seed: int, attempt: Attempts) -> list[SweepTrial]:
    """Train runs whose values are chosen from the results of those before.

    Called again, it chooses the same values, because the results are the same, and finds their runs finished.
    """
    choose = sampler(plan.varied, seed)
    trials, results = dict[Path, SweepTrial](), list[tuple[Values, float | None]]()
    for number in range(1, num_runs + 1):
        trial = plan.trial(choose(results))
        attempt(trial, f"{number} of {num_runs}")
        result = result_of(trial)
        results.append((trial.values, result.score.loss if result.is_done else None))
        trials[trial.path] = trial  # a sampler may choose the same values twice
    return [*trials.values()]
