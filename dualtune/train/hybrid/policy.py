"""The step policy of predictive training, for both of its engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dualtune.config import Config
from dualtune.train.hooks import Event
from dualtune.train.hybrid.memory import Clock, Memory, Statistics, StepResult, from_state
from dualtune.train.hybrid.monitor import Stage, TrainingPhase
from dualtune.train.hybrid.prediction import Economics
from dualtune.train.hybrid.settings import settings_of, step_cost
from dualtune.train.hybrid.step import Direction, HybridStep
from dualtune.train.policy import Outcome, PolicyState, StepActions

REPORT = "hybrid"  # the event at the end of a run


class Predictive:
    """Warmup, full, predict, correct: see docs/hybrid.md.

    `clock` gives seconds, for report and gate. `direction` replaces the velocity, to measure what that is worth.
    """

    name = "hybrid"

    def __init__(
        self, config: Config, clock: Callable[[], float] = time.perf_counter, direction: Direction | None = None
    ) -> None:
        self._direction = direction
        self._settings, self._step_cost, self._now = settings_of(config), step_cost(config), clock
        self.num_probes = 2 * self._settings.probes
        self._memory = self._new()
        self._clock, self._has_begun = Clock(), False
        self._known: tuple[float, float] | None = None  # the last loss and gradient norm that were read
        self._last: StepResult | None = None
        self._num_steps = 0

    def take(self, step: StepActions, /) -> Outcome:
        began = self._now()
        extra_steps = partial(self._extra_steps, began) if self._is_gated else None
        taking = HybridStep(self._settings, self._step_cost, self._memory, step, self._direction, extra_steps)
        outcome = taking.take()  # if it raises, nothing has changed
        phase = TrainingPhase.PREDICT if outcome.update is None else taking.memory.stage.phase
        outcome = replace(outcome, phase=phase.value)
        progress = taking.memory.counts.progress - self._memory.counts.progress
        memory = self._memory = taking.memory
        self._known = taking.known or self._known
        self._num_steps = step.index + outcome.num_steps

        # A full step is like one without prediction.
        seconds = self._now() - began
        if self._has_begun:
            is_full = outcome.update is not None and taking.is_plain and memory.attempt is None
            self._clock = self._clock.with_step(seconds, outcome.num_steps, progress, is_full)
        self._has_begun = True

        loss, grad_norm = self._known or (None, None)
        numbers = {"lr": outcome.update.lr} if outcome.update else {"virtual_steps": float(memory.counts.virtual_steps)}
        self._last = StepResult(
            loss, phase, outcome.update is None, memory.prediction_error, memory.confidence, grad_norm, 1000 * seconds,
            numbers,
        )  # fmt: skip
        if outcome.num_steps < step.steps_left:
            return outcome
        statistics = self.statistics()
        return replace(
            outcome, events=(*outcome.events, Event(self._num_steps, REPORT, statistics.table(), statistics.as_json()))
        )

    def state(self) -> PolicyState:
        extra_steps = self._memory.extra_steps + self._clock.extra if self._is_gated else 0.0
        return replace(self._memory, extra_steps=extra_steps).as_state()

    def load_state(self, state: PolicyState, /) -> None:
        self._clock = Clock()  # what it measured before is in the state, or was rolled back
        self._memory = self._new() if state.is_empty else from_state(state)
        self._known = self._last = None

    # --- what may be asked of it between two steps ------------------------------------------------------------------

    def current_phase(self) -> TrainingPhase:
        return self._memory.stage.phase

    def current_confidence(self) -> float | None:
        """Return the confidence of the last attempt; None before the first one."""
        return self._memory.confidence

    def current_step(self) -> int:
        """Return the steps of data and schedule done, as of the last step of this process."""
        return self._num_steps

    def last_result(self) -> StepResult | None:
        """Return the last step; None before the first one of this process."""
        return self._last

    def statistics(self) -> Statistics:
        memory, economics = self._memory, self._memory.economics
        return Statistics(
            memory.counts, self._step_cost, self._clock.speedup, economics.is_disabled, self._settings.gate,
            memory.extra_steps + self._clock.extra, economics.closed_at,
        )  # fmt: skip

    def force_full_phase(self, num_steps: int) -> None:
        """Let the full phase last at least `num_steps` more, now or as soon as one may begin. All processes must."""
        stage = self._memory.stage.forcing_full(num_steps)
        window = self._memory.window if stage.left == self._memory.stage.left else None
        self._memory = replace(self._memory, stage=stage, window=window)

    @property
    def _is_gated(self) -> bool:
        return self._settings.gate == "clock"

    def _extra_steps(self, began: float, progress: int) -> float:
        """Return the extra time up to now, within a step: see `Clock.extra`."""
        clock = self._clock.with_step(self._now() - began, 0, progress, is_full=False)
        return self._memory.extra_steps + clock.extra

    def _new(self) -> Memory:
        most = self._settings.max_predict_steps
        return Memory(Economics(most, most, most * self._step_cost), Stage(left=self._settings.warmup_steps))
