"""Train the arms over several seeds, each beside a baseline of equal cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from dualtune.backend import Backend
from dualtune.bench.hybrid.arms import ARMS, BASELINE, OFF, Arm
from dualtune.bench.hybrid.trial import Place, Trial
from dualtune.bench.intervals import Interval, interval, paired
from dualtune.capabilities import check_capabilities
from dualtune.config import Config
from dualtune.errors import ConfigError

Tell = Callable[[str], None]
MOST_RATES = 5  # that --tune tries upwards or downwards
SAME_COST = 0.5  # steps; below it the baseline itself is the control


@dataclass(frozen=True, slots=True)
class ArmResult:
    """An arm's runs, and the control of each: paired, seed by seed."""

    arm: Arm
    trials: tuple[Trial, ...]
    controls: tuple[Trial, ...]
    baseline: tuple[Trial, ...]

    @property
    def losses(self) -> list[float]:
        return [trial.eval_loss for trial in self.trials]

    @property
    def cost(self) -> float:
        """The cost in times of the baseline's."""
        return fmean(mine.cost / base.cost for mine, base in zip(self.trials, self.baseline, strict=True))

    @property
    def perplexity(self) -> float:
        """exp of the mean evaluation loss."""
        return math.exp(fmean(self.losses))

    @property
    def against_baseline(self) -> Interval:
        return paired(self.losses, [trial.eval_loss for trial in self.baseline])

    @property
    def against_control(self) -> Interval:
        return paired(self.losses, [trial.eval_loss for trial in self.controls])

    @property
    def wall(self) -> Interval:
        """The seconds in steps in times of the baseline's with the same seed."""
        return interval([mine.wall_s / base.wall_s for mine, base in zip(self.trials, self.baseline, strict=True)])

    @property
    def counts(self) -> dict[str, int]:
        """Attempts, accepted and undone predictions of all seeds; empty without predictions."""
        names = ("attempts", "accepted", "undone", "divergences") if self.trials[0].hybrid else ()
        return {name: sum(trial.hybrid[name] for trial in self.trials) for name in names}

    @property
    def reached(self) -> list[tuple[int, float] | None]:
        """For each seed, step and seconds at which the mean training loss was down to the baseline's last one."""
        pairs = zip(self.trials, self.baseline, strict=True)
        return [mine.reached(base.losses[-1][2]) if base.losses else None for mine, base in pairs]

    @property
    def verdict(self) -> str:
        """Say what the runs prove about the arm against its control."""
        found = self.against_control
        if self.arm.name == BASELINE:
            return ""
        if not found.excludes_zero:
            return "no evidence of a difference"
        return "better than its control" if found.mean < 0 else "worse than its control"

    def as_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm.name,
            "what": self.arm.what,
            "cost": self.cost,
            "perplexity": self.perplexity,
            "loss_minus_baseline": self.against_baseline.as_json(),
            "loss_minus_control": self.against_control.as_json(),
            "wall": self.wall.as_json(),
            "counts": self.counts,
            "reached_baseline_at": self.reached,
            "verdict": self.verdict,
            "trials": [trial.as_json() for trial in self.trials],
            "controls": [trial.as_json() for trial in self.controls],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The arms, the baseline first."""

    results: tuple[ArmResult, ...]
    learning_rate: float
    tried_rates: Mapping[float, float] = field(default_factory=lambda: {})  # learning rate -> evaluation loss
    not_offered: Mapping[str, str] = field(default_factory=lambda: {})  # arm -> why

    def as_json(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "tried_rates": {f"{rate:g}": loss for rate, loss in self.tried_rates.items()},
            "not_offered": dict(self.not_offered),
            "arms": [result.as_json() for result in self.results],
        }


def compare(
    config: Path | Mapping[str, Any], overrides: Sequence[str], backend: Backend, *, arms: Sequence[str] = tuple(ARMS),
    seeds: int = 3, tune: bool = False, tell: Tell = lambda text: None,
) -> Comparison:  # fmt: skip
    """Train each arm with `seeds` seeds, from the config's on. With `tune`, find the baseline's learning rate before.

    ConfigError for an unknown arm, a config without evaluation data, or one that the backend cannot train.
    """
    if unknown := [name for name in arms if name not in ARMS]:
        raise ConfigError(f"--arms: got '{unknown[0]}', allowed: {', '.join(ARMS)}")
    place = Place(config, tuple(overrides), backend)
    base = place.load(OFF)
    check_capabilities(backend, base)
    if not base.data.eval:
        raise ConfigError("data.eval: got none, but arms are compared by their evaluation loss. Name evaluation data")
    rates: dict[float, float] = {}
    if tune:
        rates = tune_rate(place, base, tell)
        best = min(rates, key=lambda rate: rates[rate])
        place = Place(config, (*place.overrides, f"train.learning_rate={best}"), backend)
    runs = _Runs(place, place.load(OFF), tell)
    offered, refused = _offered(place, [BASELINE, *(name for name in arms if name != BASELINE)])
    for seed in range(base.run.seed, base.run.seed + seeds):  # arms of a seed follow each other: so do their times
        for arm in offered:
            runs.add(arm, seed)
    return Comparison(tuple(map(runs.result, offered)), runs.config.train.learning_rate, rates, refused)


def tune_rate(place: Place, base: Config, tell: Tell) -> dict[float, float]:
    """Return the baseline's evaluation loss by learning rate: doubled, or else halved, until that stops helping."""
    found: dict[float, float] = {}

    def loss_at(rate: float) -> float:
        tell(f"the baseline at the learning rate {rate:g}")
        changes = {**ARMS[BASELINE].changes(base), "train.learning_rate": rate}
        found[rate] = place.run(ARMS[BASELINE], base.run.seed, changes).eval_loss
        return found[rate]

    rate = base.train.learning_rate
    best = loss_at(rate)
    for factor in (2.0, 0.5):
        for power in range(1, MOST_RATES + 1):
            loss = loss_at(rate * factor**power)
            if not loss < best:
                break
            best = loss
        if len(found) > 2:  # upwards has helped
            break
    return found


@dataclass(slots=True)
class _Runs:
    """The runs so far; a control of the same steps and seed is trained once."""

    place: Place
    config: Config  # of the baseline
    tell: Tell
    _trials: dict[str, list[Trial]] = field(default_factory=lambda: {})
    _controls: dict[str, list[Trial]] = field(default_factory=lambda: {})
    _shorter: dict[tuple[int, int], Trial] = field(default_factory=lambda: {})  # (seed, steps)

    def add(self, arm: Arm, seed: int) -> None:
        """Train an arm with a seed, and its control. The baseline comes first."""
        self.tell(f"{arm.name}, seed {seed}")
        trial = self.place.run(arm, seed, arm.changes(self.config))
        self._trials.setdefault(arm.name, []).append(trial)
        if arm.name == BASELINE:
            self._shorter[seed, trial.steps] = trial
        self._controls.setdefault(arm.name, []).append(self._control(trial))

    def result(self, arm: Arm) -> ArmResult:
        trials, controls, baseline = self._trials[arm.name], self._controls[arm.name], self._trials[BASELINE]
        return ArmResult(arm, tuple(trials), tuple(controls), tuple(baseline))

    def _control(self, trial: Trial) -> Trial:
        """Return the baseline whose whole schedule has as many steps as the trial's cost buys."""
        is_same = abs(trial.cost - trial.steps) <= SAME_COST
        key = trial.seed, trial.steps if is_same else max(1, round(trial.cost))
        if key not in self._shorter:
            self.tell(f"the control of {key[1]} steps, seed {trial.seed}")
            warmup = self.config.train.warmup
            scaled = max(1, round(warmup * key[1] / trial.steps)) if warmup >= 1 else warmup
            changes = OFF | {"train.steps": key[1], "train.warmup": scaled}
            self._shorter[key] = self.place.run(ARMS[BASELINE], trial.seed, changes)
        return self._shorter[key]


def _offered(place: Place, names: Sequence[str]) -> tuple[list[Arm], dict[str, str]]:
    """Return the arms that are possible with this config and backend, and why the others are not."""
    base, offered, refused = place.load(OFF), list[Arm](), dict[str, str]()
    for arm in (ARMS[name] for name in names):
        try:
            check_capabilities(place.backend, place.load(arm.changes(base)))
            offered.append(arm)
        except ConfigError as error:
            refused[arm.name] = str(error).splitlines()[0]
    return offered, refused
