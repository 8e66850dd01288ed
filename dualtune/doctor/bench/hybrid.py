"""Predictive training beside its controls, on the config and model of a user: arms, runs and a plot."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.config import Config, load_config
from dualtune.doctor.bench.intervals import Interval, interval, paired
from dualtune.engine.backend import Backend
from dualtune.engine.capabilities import check_capabilities
from dualtune.show.report.page import render
from dualtune.show.run import run
from dualtune.train.hooks import Hook, RunInfo, StepRecord
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.hybrid.prediction import Window, norm
from dualtune.train.hybrid.settings import settings_of, step_cost
from dualtune.train.policies import MakePolicy
from dualtune.train.policy import Outcome, PolicyState, StepPolicy
from dualtune.train.step import TrainingStep

# ----------------------------------------------------------------------------------------------------------------------
# Two step policies that only a comparison needs: frozen steps, and predictions in a random direction.


class Freezing:
    """The mechanism of the first predictive trainer: a predicted step computes a loss and changes no weight.

    After the warmup, `full_steps` computed steps alternate with half as many frozen ones, so a third of the backward
    passes is skipped. A frozen step costs the forward pass of its batch, as there.
    """

    name = "freeze"
    num_probes = 0

    def __init__(self, config: Config) -> None:
        self._settings, self._step_cost = settings_of(config), step_cost(config)
        self._computed = self._frozen = 0

    @property
    def cost_steps(self) -> float:
        return self._computed + self._frozen / self._step_cost

    def take(self, step: TrainingStep) -> Outcome:
        full = self._settings.full_steps
        in_cycle = (step.index - self._settings.warmup_steps) % (full + full // 2)
        if step.index >= self._settings.warmup_steps and in_cycle >= full and step.steps_left > 1:
            self._frozen += 1
            step.batch_loss()
            return Outcome(None)
        self._computed += 1
        step.add_gradients()
        return Outcome(step.update())

    def state(self) -> PolicyState:
        return PolicyState({"computed": self._computed, "frozen": self._frozen})

    def load_state(self, state: PolicyState) -> None:
        self._computed, self._frozen = (int(state.values.get(name, 0)) for name in ("computed", "frozen"))


def predict_at_random(seed: int) -> Callable[[Config], Predictive]:
    """Return what makes a policy that replaces each velocity by a random direction of the same length."""
    rng = np.random.default_rng(seed)

    def direction(window: Window) -> np.ndarray:
        velocity_P = window.velocity()
        random_P = rng.standard_normal(velocity_P.shape, np.float32)
        return random_P * np.float32(norm(velocity_P) / norm(random_P))

    return lambda config: Predictive(config, direction=direction)


# ----------------------------------------------------------------------------------------------------------------------
# The arms of a comparison: what each changes in the config, and why it may be impossible there.

BASELINE = "baseline"
OFF = {"hybrid.enabled": False}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train. Its control is the baseline whose whole schedule has as many steps as the arm's cost buys."""

    name: str
    what: str
    changes: Callable[[Config], Mapping[str, Any]] = field(default=lambda config: {})
    policy: Callable[[int], MakePolicy] | None = None  # by the seed of the run; None: the policy of the config


def _engine(name: str) -> Callable[[Config], Mapping[str, Any]]:
    """Return the changes of an arm. Its cost is judged by tokens, and no clock decides what it does."""
    return lambda config: {"hybrid.enabled": True, "hybrid.engine": name, "hybrid.gate": "none"}


def _schedule_free(config: Config) -> Mapping[str, Any]:
    rate = 1.375 * config.train.learning_rate
    return OFF | {"train.schedule": "schedule_free", "train.average": "none", "train.learning_rate": rate}


def _average(config: Config) -> Mapping[str, Any]:
    rate = 0.75 * config.train.learning_rate
    changes = {"train.schedule": "constant", "train.average": "tail", "train.average_over": 0.4}
    return OFF | changes | {"train.learning_rate": rate}


def _off(config: Config) -> Mapping[str, Any]:
    return OFF


# The rates of schedule_free and average, relative to the baseline's, are those of docs/averaging.md.
ARMS = {
    arm.name: arm
    for arm in (
        Arm(BASELINE, "the config without predictive training", _off),
        Arm("predict", "hybrid.engine: predict", _engine("predict"), lambda seed: Predictive),
        Arm("fast_forward", "hybrid.engine: fast_forward", _engine("fast_forward"), lambda seed: Predictive),
        Arm("random", "predict in random directions of equal length", _engine("predict"), predict_at_random),
        Arm("freeze", "a third of the steps after the warmup changes no weight", _off, lambda seed: Freezing),
        Arm("schedule_free", "train.schedule: schedule_free at 1.375 of the rate", _schedule_free),
        Arm("average", "a constant rate of 0.75, the mean of the last 0.4 of the weights", _average),
    )
}

# ----------------------------------------------------------------------------------------------------------------------
# One run of an arm: what it cost, where its loss ended, and what its predictions did.

SMOOTH = 10  # steps whose mean training loss says how far a run is


@dataclass(frozen=True, slots=True)
class Trial:
    """A run. Its cost is in steps of the baseline, probes and frozen steps by their share of one."""

    arm: str
    seed: int
    steps: int  # of the schedule
    cost: float
    eval_loss: float
    wall_s: float  # in its steps, each ended by reading its loss from the device; without loading and evaluation
    losses: tuple[tuple[int, float, float], ...] = field(repr=False)  # (step, seconds so far, mean training loss)
    hybrid: Mapping[str, Any] = field(default_factory=lambda: {})  # the event `hybrid` of predictive training

    def reached(self, loss: float) -> tuple[int, float] | None:
        """Return the step and the seconds at which the mean training loss first was this low; None: never."""
        return next(((step, seconds) for step, seconds, mean in self.losses if mean <= loss), None)

    def as_json(self) -> dict[str, Any]:
        names = ("arm", "seed", "steps", "cost", "eval_loss", "wall_s")
        return {name: getattr(self, name) for name in names} | ({"hybrid": dict(self.hybrid)} if self.hybrid else {})


@dataclass(frozen=True, slots=True)
class Place:
    """The config that all arms start from, and where they run."""

    config: Path | Mapping[str, Any]
    overrides: tuple[str, ...]
    backend: Backend

    def load(self, changes: Mapping[str, Any] | None = None) -> Config:
        """Return the config with an arm's changes. ConfigError if they are impossible with it."""
        changed = (f"{key}={'null' if value is None else value}" for key, value in (changes or {}).items())
        return load_config(self.config, (*self.overrides, *changed))

    def run(self, arm: Arm, seed: int, changes: Mapping[str, Any]) -> Trial:
        """Train an arm. The run directory is a temporary one; only the end of the run is evaluated."""
        policies: list[StepPolicy] = []

        def make(config: Config) -> StepPolicy:
            assert arm.policy is not None
            policies.append(arm.policy(seed)(config))
            return policies[-1]

        with tempfile.TemporaryDirectory(prefix="dualtune-") as folder:
            alone = {"run.dir": folder, "run.seed": seed, "run.eval_every": None, "run.save_every": None}
            config, clock = self.load({**changes, **alone}), _Clock()
            result = run(config, self.backend, [clock], resume="never", policy=make if arm.policy else None)
        if result.eval_loss is None:
            raise ConfigError("data.eval: got nothing to evaluate, but arms are compared by their evaluation loss")
        cost, hybrid = float(clock.num_steps), dict[str, Any]()
        for policy in policies:
            if isinstance(policy, Predictive):
                cost, hybrid = policy.statistics().cost_steps, policy.statistics().as_json()
            elif isinstance(policy, Freezing):
                cost = policy.cost_steps
        return Trial(
            arm.name, seed, clock.num_steps, cost, result.eval_loss, clock.seconds, tuple(clock.smooth_losses()), hybrid
        )


class _Clock(Hook):
    """Adds up the seconds in steps, and keeps the losses."""

    def __init__(self) -> None:
        self.num_steps, self.seconds = 0, 0.0
        self._rows: list[tuple[int, float, float]] = []

    def on_start(self, info: RunInfo) -> None:
        self.num_steps = info.num_steps

    def on_step(self, record: StepRecord) -> None:
        self.seconds += record.step_s
        self._rows.append((record.step, self.seconds, record.loss))

    def smooth_losses(self) -> Sequence[tuple[int, float, float]]:
        rows = self._rows
        means = (fmean(loss for _, _, loss in rows[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(rows)))
        return [(step, seconds, mean) for (step, seconds, _), mean in zip(rows, means, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Train the arms over several seeds, each beside a baseline of equal cost.

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
        gap = self.against_control
        if self.arm.name == BASELINE:
            return ""
        if not gap.excludes_zero:
            return "no evidence of a difference"
        return "better than its control" if gap.mean < 0 else "worse than its control"

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
    config_of_baseline = place.load(OFF)
    offered, refused = _offered(place, [BASELINE, *(name for name in arms if name != BASELINE)])
    trials: dict[str, list[Trial]] = {arm.name: [] for arm in offered}
    controls: dict[str, list[Trial]] = {arm.name: [] for arm in offered}
    baselines: dict[tuple[int, int], Trial] = {}  # by seed and number of steps: several arms may cost the same

    # Arms of a seed follow each other, so that their times can be compared; the baseline comes first.
    for seed in range(base.run.seed, base.run.seed + seeds):
        for arm in offered:
            tell(f"{arm.name}, seed {seed}")
            trial = place.run(arm, seed, arm.changes(config_of_baseline))
            trials[arm.name].append(trial)
            if arm.name == BASELINE:
                baselines[seed, trial.steps] = trial
            # The control is the baseline whose whole schedule has as many steps as the arm's cost buys.
            steps = trial.steps if abs(trial.cost - trial.steps) <= SAME_COST else max(1, round(trial.cost))
            if (seed, steps) not in baselines:
                tell(f"the control of {steps} steps, seed {seed}")
                warmup = config_of_baseline.train.warmup
                scaled = max(1, round(warmup * steps / trial.steps)) if warmup >= 1 else warmup
                changes = OFF | {"train.steps": steps, "train.warmup": scaled}
                baselines[seed, steps] = place.run(ARMS[BASELINE], seed, changes)
            controls[arm.name].append(baselines[seed, steps])

    baseline = tuple(trials[BASELINE])
    results = (ArmResult(arm, tuple(trials[arm.name]), tuple(controls[arm.name]), baseline) for arm in offered)
    return Comparison(tuple(results), config_of_baseline.train.learning_rate, rates, refused)


def tune_rate(place: Place, base: Config, tell: Tell) -> dict[float, float]:
    """Return the baseline's evaluation loss by learning rate: doubled, or else halved, until that stops helping."""
    losses: dict[float, float] = {}

    def loss_at(rate: float) -> float:
        tell(f"the baseline at the learning rate {rate:g}")
        changes = {**ARMS[BASELINE].changes(base), "train.learning_rate": rate}
        losses[rate] = place.run(ARMS[BASELINE], base.run.seed, changes).eval_loss
        return losses[rate]

    rate = base.train.learning_rate
    best = loss_at(rate)
    for factor in (2.0, 0.5):
        for power in range(1, MOST_RATES + 1):
            loss = loss_at(rate * factor**power)
            if not loss < best:
                break
            best = loss
        if len(losses) > 2:  # upwards has helped
            break
    return losses


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


# ----------------------------------------------------------------------------------------------------------------------
# The comparison as an SVG: loss over cost, the arms as points on top of the line of the baseline and the controls.

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 70, 20, 20, 50  # of the plot, in units of the SVG
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")  # Okabe and Ito's, and gray


def plot(comparison: Comparison) -> str:
    """Return the SVG."""
    results = comparison.results
    # (cost, mean loss) of the controls; that of the baseline is itself.
    line = {
        (
            fmean(own.cost / base.cost for own, base in zip(result.controls, result.baseline, strict=True)),
            fmean(trial.eval_loss for trial in result.controls),
        )
        for result in results
    }
    points = [(result.cost, fmean(result.losses)) for result in results]
    (low_x, high_x), (low_y, high_y) = (_range([*values]) for values in zip(*line, *points, strict=True))

    def at_x(value: float) -> float:
        return LEFT + (value - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        """Return the height of a loss, within the plot."""
        share = (min(max(value, low_y), high_y) - low_y) / (high_y - low_y)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    arms: list[dict[str, Any]] = []
    for index, (result, (x, y)) in enumerate(zip(results, points, strict=True)):
        margin = result.against_control.margin
        ends = None if margin is None else (at_y(y - margin), at_y(y + margin))
        arms.append(
            {"name": result.arm.name, "color": COLORS[index % len(COLORS)], "x": at_x(x), "y": at_y(y), "ends": ends}
        )
    quarters = [index / 4 for index in range(5)]
    return render(
        "arms.svg", width=WIDTH, height=HEIGHT, left=LEFT, right=WIDTH - RIGHT, top=TOP, bottom=HEIGHT - BOTTOM,
        arms=arms, line=[(at_x(x), at_y(y)) for x, y in sorted(line)],
        across=[(at_x(x), f"{x:.2f}") for x in (low_x + share * (high_x - low_x) for share in quarters)],
        up=[(at_y(y), f"{y:.3f}") for y in (low_y + share * (high_y - low_y) for share in quarters)],
    )  # fmt: skip


def _range(values: list[float]) -> tuple[float, float]:
    """Return the ends of an axis: those of the values, and a tenth more on both sides."""
    low, high = min(values), max(values)
    room = (high - low) / 10 or abs(high) / 100 or 1.0
    return low - room, high + room
