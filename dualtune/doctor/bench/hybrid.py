"""Predictive training beside its controls, on the config and model of a user: arms, runs, a table and a plot."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.config import Config, load_config
from dualtune.doctor.bench.intervals import Interval, interval, paired
from dualtune.engine.backend import Backend
from dualtune.engine.capabilities import check_capabilities
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
        self._settings, self._step_cost = settings_of(config.hybrid), step_cost(config)
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
    return lambda config: {"hybrid.enabled": True, "hybrid.engine": name}


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
        made: list[StepPolicy] = []

        def make(config: Config) -> StepPolicy:
            assert arm.policy is not None
            made.append(arm.policy(seed)(config))
            return made[-1]

        with tempfile.TemporaryDirectory(prefix="dualtune-") as folder:
            alone = {"run.dir": folder, "run.seed": seed, "run.eval_every": None, "run.save_every": None}
            config, clock = self.load({**changes, **alone}), _Clock()
            result = run(config, self.backend, [clock], resume="never", policy=make if arm.policy else None)
        if result.eval_loss is None:
            raise ConfigError("data.eval: got nothing to evaluate, but arms are compared by their evaluation loss")
        cost, hybrid = float(clock.num_steps), dict[str, Any]()
        for policy in made:
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
    runs = _Runs(place, place.load(OFF), tell)
    offered, refused = _offered(place, [BASELINE, *(name for name in arms if name != BASELINE)])
    for seed in range(base.run.seed, base.run.seed + seeds):  # arms of a seed follow each other: so do their times
        for arm in offered:
            runs.add(arm, seed)
    return Comparison(tuple(map(runs.result, offered)), runs.config.train.learning_rate, rates, refused)


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


# ----------------------------------------------------------------------------------------------------------------------
# The comparison as the rows of a table, and as an SVG.

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 70, 20, 20, 50  # of the plot, in units of the SVG
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")  # Okabe and Ito's, and gray
HEAD = ("arm", "cost", "loss", "perplexity", "control", "perplexity against control", "time", "predictions", "verdict")
LEGEND = (
    ("cost", "of the baseline's, in steps; a probe counts by its tokens, a frozen step as a forward pass"),
    ("control", "the loss of a baseline whose whole schedule has as many steps as the arm's cost buys"),
    ("against control", "paired over the seeds, with a 95 % interval (Student's t)"),
    ("time", "in steps, by the clock, in times of the baseline's; as steady as the machine"),
    ("predictions", "accepted of attempted, and undone after their check, over all seeds"),
)


def lines(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table as text, the header first."""
    yield HEAD
    for result in comparison.results:
        counts, is_baseline = result.counts, result.arm.name == BASELINE
        told = f"{counts['accepted']} of {counts['attempts']}, {counts['undone']} undone" if counts else ""
        yield (
            result.arm.name,
            f"{result.cost:.3f}",
            f"{fmean(result.losses):.4f}",
            f"{result.perplexity:.3f}",
            "" if is_baseline else f"{fmean(trial.eval_loss for trial in result.controls):.4f}",
            "" if is_baseline else in_percent(result.against_control),
            "" if is_baseline else f"{result.wall.mean:.2f}",
            told,
            result.verdict,
        )


def in_percent(losses: Interval) -> str:
    """Return a difference of losses as one of perplexities: exp(d) − 1, with the ends of its interval."""
    low_to_high = [losses.mean] if losses.margin is None else [losses.mean - losses.margin, losses.mean + losses.margin]
    ends = [f"{100 * math.expm1(end):+.2f}" for end in low_to_high]
    mean = f"{100 * math.expm1(losses.mean):+.2f} %"
    return mean if losses.margin is None else f"{mean} ({ends[0]} to {ends[1]})"


def plot(comparison: Comparison) -> str:
    """Return an SVG: loss over cost, the arms as points on top of the line of the baseline and the controls."""
    return _Plot(comparison).svg()


class _Plot:
    def __init__(self, comparison: Comparison) -> None:
        self._results = comparison.results
        self._line = sorted(self._control_points())
        points = self._line + [(result.cost, fmean(result.losses)) for result in comparison.results]
        self._x, self._y = _range([x for x, _ in points]), _range([y for _, y in points])

    def svg(self) -> str:
        line = " ".join(f"{self._at_x(x):.1f},{self._at_y(y):.1f}" for x, y in self._line)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-label="Evaluation loss over cost, arms beside the baseline" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *self._axes(),
            f'<polyline points="{line}" fill="none" stroke="#444444" stroke-dasharray="4 3"/>',
            *(part for i, result in enumerate(self._results) for part in self._point(result, COLORS[i % len(COLORS)])),
            "</svg>\n",
        ]
        return "\n".join(parts)

    def _control_points(self) -> set[tuple[float, float]]:
        """Return (cost, mean loss) of the controls; that of the baseline is itself."""
        return {
            (
                fmean(own.cost / base.cost for own, base in zip(result.controls, result.baseline, strict=True)),
                fmean(trial.eval_loss for trial in result.controls),
            )
            for result in self._results
        }

    def _axes(self) -> Iterator[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for i in range(5):
            x, y = (low + i * (high - low) / 4 for low, high in (self._x, self._y))
            at_x, at_y = self._at_x(x), self._at_y(y)
            yield f'<line x1="{LEFT}" x2="{right}" y1="{at_y:.1f}" y2="{at_y:.1f}" stroke="#dddddd"/>'
            yield f'<text x="{LEFT - 6}" y="{at_y + 4:.1f}" text-anchor="end">{y:.3f}</text>'
            yield f'<text x="{at_x:.1f}" y="{bottom + 16}" text-anchor="middle">{x:.2f}</text>'
        yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">cost, of the baseline</text>'
        yield f'<text x="{LEFT}" y="{TOP - 6}">evaluation loss (dashed: the baseline with fewer steps)</text>'

    def _point(self, result: ArmResult, color: str) -> Iterator[str]:
        x, y, margin = self._at_x(result.cost), fmean(result.losses), result.against_control.margin
        if margin is not None:
            ends = (self._at_y(min(max(end, self._y[0]), self._y[1])) for end in (y - margin, y + margin))
            low, high = ends
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{color}"/>'
        yield f'<circle cx="{x:.1f}" cy="{self._at_y(y):.1f}" r="4" fill="{color}"/>'
        anchor = "end" if x > WIDTH / 2 else "start"
        x += -8 if anchor == "end" else 8
        place = f'x="{x:.1f}" y="{self._at_y(y) + 4:.1f}" text-anchor="{anchor}"'
        yield f'<text {place} fill="{color}">{escape(result.arm.name)}</text>'

    def _at_x(self, value: float) -> float:
        low, high = self._x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def _at_y(self, value: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _range(values: list[float]) -> tuple[float, float]:
    """Return the ends of an axis: those of the values, and a tenth more on both sides."""
    low, high = min(values), max(values)
    room = (high - low) / 10 or abs(high) / 100 or 1.0
    return low - room, high + room
