"""Two step policies that only a comparison needs: frozen steps, and predictions in a random direction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dualtune.config import Config
from dualtune.hybrid.policy import Predictive
from dualtune.hybrid.settings import settings_of, step_cost
from dualtune.hybrid.vectors import norm
from dualtune.hybrid.velocity import Window
from dualtune.policy import Outcome, PolicyState
from dualtune.train.step import TrainingStep


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
            step.mean_loss(step.batches)
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
