"""One run of an arm: what it cost, where its loss ended, and what its predictions did."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from dualtune.backend import Backend
from dualtune.bench.hybrid.arms import Arm
from dualtune.bench.hybrid.policies import Freezing
from dualtune.config import Config, load_config
from dualtune.errors import ConfigError
from dualtune.hooks import Hook, RunInfo, StepRecord
from dualtune.hybrid.policy import Predictive
from dualtune.policy import StepPolicy
from dualtune.train.run import run

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
        given = (f"{key}={'null' if value is None else value}" for key, value in (changes or {}).items())
        return load_config(self.config, (*self.overrides, *given))

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
            found = run(config, self.backend, [clock], resume="never", policy=make if arm.policy else None)
        if found.eval_loss is None:
            raise ConfigError("data.eval: got nothing to evaluate, but arms are compared by their evaluation loss")
        cost, hybrid = float(clock.num_steps), dict[str, Any]()
        for policy in made:
            if isinstance(policy, Predictive):
                cost, hybrid = policy.statistics().cost_steps, policy.statistics().as_json()
            elif isinstance(policy, Freezing):
                cost = policy.cost_steps
        return Trial(
            arm.name, seed, clock.num_steps, cost, found.eval_loss, clock.seconds, tuple(clock.smooth_losses()), hybrid
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
