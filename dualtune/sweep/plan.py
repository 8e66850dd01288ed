"""A sweep from its command line to its last run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualtune.backend import Backend
from dualtune.base_model import read_config, resolve_model
from dualtune.config import Config
from dualtune.data.documents import Show
from dualtune.errors import ConfigError
from dualtune.sweep.attempts import Attempts
from dualtune.sweep.halving import check_comparable, halve, rungs
from dualtune.sweep.rates import default_rates
from dualtune.sweep.scores import result_of
from dualtune.sweep.search import sampler
from dualtune.sweep.trials import CheckedTrial, SweepTrial, check
from dualtune.sweep.values import Choices, Range, Values, grid, names_of, overrides_of, read_values
from dualtune.train.state.run_dir import is_run_dir, path_of

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
        choices = [each for each in self.varied if isinstance(each, Choices)]
        if self.num_chosen is None:
            return self._named(grid(choices))
        return self._named([{each.key: each.ends[end] for each in self.varied} for end in (0, 1)])

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

    first = make_one(overrides_of({each.key: each.ends[0] for each in varied}))
    if not varied:
        if "train.learning_rate" in fixed:
            raise ConfigError(
                "--set train.learning_rate: has one value. Give several, as in --set train.learning_rate=1e-4,1e-3, or "
                "none for the default grid; another key is tried with its own values"
            )
        varied = [default_rates(first, read_config(resolve_model(first.model.name, weights=False)))]
    if num_chosen is None and (ranges := [each.key for each in varied if isinstance(each, Range)]):
        raise ConfigError(f"--set {ranges[0]}: a range needs --trials N; a grid has values, such as 1e-5,1e-4,1e-3")
    if num_chosen is not None and halving:
        raise ConfigError("--halving is for a grid, and --trials chooses values one after another. Leave one out")
    place = directory or path_of(first).with_name(f"{path_of(first).name}-sweep")
    if is_run_dir(place) or (place.exists() and not place.is_dir()):
        what = "a run directory" if place.is_dir() else "a file"
        raise ConfigError(f"--dir: {place} is {what}. Choose another directory, in which the runs of the sweep lie")
    return SweepPlan(varied, make_one, place, num_chosen, halving)


def check_plan(plan: SweepPlan, backend: Backend, show: Show) -> list[CheckedTrial]:
    """Check every run that is known, before the first one is trained."""
    checked = [check(trial, backend, show) for trial in plan.trials()]
    if plan.halving:
        check_comparable(checked)
    return checked


def carry_out(
    plan: SweepPlan, checked: Sequence[CheckedTrial], attempt: Attempts, tell: Callable[[str], None]
) -> list[SweepTrial]:
    """Train the runs of a plan, and return them. What is finished already stays as it is."""
    if plan.num_chosen is not None:
        return _search(plan, plan.num_chosen, checked[0].trial.config.run.seed, attempt)
    trials = [each.trial for each in checked]
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
    trials, known = dict[Path, SweepTrial](), list[tuple[Values, float | None]]()
    for number in range(1, num_runs + 1):
        trial = plan.trial(choose(known))
        attempt(trial, f"{number} of {num_runs}")
        result = result_of(trial)
        known.append((trial.values, result.score.loss if result.is_done else None))
        trials[trial.path] = trial  # a sampler may choose the same values twice
    return [*trials.values()]
