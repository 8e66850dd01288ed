"""One step of predictive training. It changes its own copy of the memory, which the policy keeps if all went well."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from dualtune.engine.backend import Engine
from dualtune.train.hooks import Event
from dualtune.train.hybrid.memory import Memory, Prediction, ReturnPoint
from dualtune.train.hybrid.monitor import Level, Signal, TrainingPhase, prediction_error
from dualtune.train.hybrid.prediction import (
    FEWEST_PROBES,
    GATE,
    Window,
    confidence,
    flatten,
    half_window,
    is_worse,
    norm,
    reach,
    split,
)
from dualtune.train.hybrid.settings import Settings
from dualtune.train.policy import Outcome, StepActions

# ----------------------------------------------------------------------------------------------------------------------
# Where the optimizer's state is while a prediction is searched, which needs forward passes only.


class OffloadsOptimizer(Protocol):
    """An engine whose backend honours hybrid.offload: optimizer, because its device has memory of its own."""

    def offloaded_optimizer(self) -> AbstractContextManager[None]:
        """Keep the optimizer's state in host memory inside the block. Afterwards it is bitwise the same."""
        ...


def offloaded(engine: Engine, offload: str) -> AbstractContextManager[None]:
    """Return the block of a search with this value of hybrid.offload."""
    return nullcontext() if offload == "none" else cast(OffloadsOptimizer, engine).offloaded_optimizer()


# ----------------------------------------------------------------------------------------------------------------------
# The line search: how far along the velocity the probe documents improve, with forward passes only.

WORTH = 0.5  # a predicted step must gain at least this share of what a computed one did


def distances(most: int, interval: int) -> list[int]:
    """Return the steps to try, up to `most`: 1, 2, 4, 8, … below `interval`, then its multiples."""
    taus: list[int] = []
    tau = 1
    while tau <= most:
        taus.append(tau)
        tau = min(2 * tau, interval) if tau < interval else tau + interval
    return taus


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a line search. Losses are those of the probe documents, float64 [D]."""

    tau: int = 0  # the best distance in steps; 0: none is better than staying
    confidence: float = 0.0  # that it is worth its steps
    losses_D: np.ndarray | None = None  # at the best distance
    at_bound: bool = False  # the largest distance was the best one
    num_probed: int = 0  # distances
    num_micro_corrections: int = 0  # of them, multiples of the correction interval


def line_search(
    losses_at: Callable[[int], np.ndarray], now_D: np.ndarray, step_gain_D: np.ndarray, taus: Sequence[int],
    worth_steps: Callable[[int], float], interval: int,
) -> SearchResult:  # fmt: skip
    """Return the best distance, trying one after another until one is no better than the one before.

    Better means a larger mean of: the gain of a document, less `WORTH` of what as many computed steps would have gained
    it (nothing, if those made it worse). A small gain in a random direction is therefore no evidence, though nearly
    half of all directions have one.

    `now_D`: losses without a prediction. `step_gain_D`: what a computed step has gained each document lately.
    `worth_steps`: how many such steps a distance is worth by the learning rates.
    """
    best, best_gain, probed, micro = SearchResult(), 0.0, 0, 0
    least_D = WORTH * step_gain_D if float(step_gain_D.mean()) > 0 else np.zeros_like(step_gain_D)
    for tau in taus:
        losses_D = losses_at(tau)
        probed += 1
        micro += tau % interval == 0
        gains_D = now_D - losses_D - worth_steps(tau) * least_D
        gain = float(gains_D.mean())
        if not gain > best_gain:  # also if NaN
            break
        best_gain = gain
        best = SearchResult(tau, confidence(gains_D), losses_D, tau == taus[-1])
    return SearchResult(best.tau, best.confidence, best.losses_D, best.at_bound, probed, micro)


# ----------------------------------------------------------------------------------------------------------------------
# One step, in whichever phase it is taken.

Direction = Callable[[Window], np.ndarray]  # the change of the weights per step, float32 [P]
FULL, PREDICT, CORRECT = TrainingPhase.FULL, TrainingPhase.PREDICT, TrainingPhase.CORRECT


class HybridStep:
    """A step that is being taken. `step_cost`: of a full step, in forward passes of its batch.

    `extra_steps`: measures the time that predictions have cost up to now, in full steps, given the progress in this
    step; None: no clock decides.
    """

    def __init__(
        self, settings: Settings, step_cost: float, memory: Memory, step: StepActions,
        direction: Direction | None = None, extra_steps: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.known: tuple[float, float] | None = None  # loss and gradient norm, if some were read
        self.is_plain = True  # no weights were read, and no documents probed
        self._settings, self._step_cost, self._step, self._direction = settings, step_cost, step, direction
        self._extra_steps, self._progress, self._has_closed = extra_steps, memory.counts.progress, False
        self._noted: list[tuple[str, str, Mapping[str, Any]]] = []  # events
        self._search_documents, self._check_documents = step.probe_documents[0::2], step.probe_documents[1::2]

    def take(self) -> Outcome:
        """Take the step: predicted if there is evidence, else ordinary."""
        memory = self.memory
        if memory.start is None:
            self._remember(start=self._step.engine.adapter_state())
        if memory.stage.phase is CORRECT:
            self._read_output()
            is_due = memory.stage.left == 0 or (self.memory.attempt is not None and self.memory.attempt.is_critical)
            if is_due and (snapshot := self._check()) is not None:
                return self._ordinary_from(snapshot)
        elif memory.stage.phase is TrainingPhase.WARMUP and memory.stage.left == 0:
            self._enter(FULL)
        if self.memory.stage.phase is FULL:
            self._go_on_with_window()
        if self.memory.stage.phase is PREDICT:
            if (jump := self._predict()) is not None:
                return jump
            self._enter(CORRECT if self.memory.attempt else FULL)
        return self._ordinary()

    # --- ordinary steps ---------------------------------------------------------------------------------------------

    def _ordinary(self) -> Outcome:
        """Take a step with gradients. The output of the one before is read when this one is queued: nothing waits."""
        self._begin_window()
        self._step.add_gradients()
        update = self._step.update()
        stage, counts = self.memory.stage, self.memory.counts
        self._remember(counts=counts.with_step(stage.phase, update.num_tokens), stage=stage.stepped())
        self._read_output()
        self._remember(output=update.output)
        return Outcome(update, 1, self._events(1), must_save=self._has_closed)

    def _read_output(self) -> None:
        """Read loss and gradient norm of the last step, and act on what the monitor says."""
        if (output := self.memory.output) is None:
            return
        loss, grad_norm = self.known = float(output.loss), float(output.grad_norm)
        self._remember(output=None)
        attempt = self.memory.attempt
        if attempt is not None and attempt.predicted_loss is not None and math.isfinite(loss):
            monitor, signal = self.memory.monitor.compare(attempt.predicted_loss, loss)
            error = prediction_error(attempt.predicted_loss, loss)
            self._remember(monitor=monitor, attempt=replace(attempt, predicted_loss=None), prediction_error=error)
            self._note(signal)
        monitor, signal = self.memory.monitor.observe(loss, grad_norm, self._settings.divergence_threshold)
        self._remember(monitor=monitor)
        self._note(signal)

    def _note(self, signal: Signal | None) -> None:
        """Log and count a signal. From a warning on, no prediction begins before another full phase."""
        if signal is None or signal.level < Level.WARNING:
            return
        memory = self.memory
        is_critical = signal.level is Level.CRITICAL
        details = {"signal": signal.kind.value, "level": signal.level.name.lower()}
        self._log("hybrid_signal", f"{signal.kind.value}: {signal.message}", **details)
        self._remember(counts=memory.counts.plus(divergences=int(is_critical)))
        if is_critical and memory.attempt is not None:
            self._remember(attempt=replace(memory.attempt, is_critical=True))
        if memory.stage.phase is FULL:
            self._remember(stage=memory.stage.forcing_full(self._settings.full_steps), window=None)

    # --- the window -------------------------------------------------------------------------------------------------

    def _begin_window(self) -> None:
        """Take the first snapshot of a window, if the full phase ends in as many steps and an attempt is wanted then.

        Reading the weights synchronizes, so it is done only in windows that end in an attempt.
        """
        stage, half = self.memory.stage, half_window(self._settings.full_steps)
        if stage.phase is FULL and stage.left == 2 * half and self._has_opportunity():
            self._remember(window=Window(half, self._weights()))

    def _go_on_with_window(self) -> None:
        """In a full phase: take the next snapshot of the window, and begin to predict at its end."""
        left, window = self.memory.stage.left, self.memory.window
        if window is not None and window.needs(left):
            self._remember(window=window.with_snapshot(left, self._weights()))
        if left == 0:
            self._enter(PREDICT if window else FULL)

    def _has_opportunity(self) -> bool:
        """Return whether to attempt a prediction at the end of this full phase: if it fits, and is likely to pay."""
        ahead = 2 * half_window(self._settings.full_steps)
        if self._step.steps_left <= ahead + self._settings.correct_steps + 1:
            return False
        if self._is_closed():
            return False
        economics, is_wanted = self.memory.economics.at_opportunity()
        self._remember(economics=economics)
        return is_wanted

    def _is_closed(self) -> bool:
        """End predictions for the rest of the run if another search could make it slower than the gate allows.

        Return whether they have ended. The clock of the first process decides. No two runs measure the same, so the
        decision is saved at once: whatever resumes the run knows it, and no step after it depends on a clock.
        """
        memory, step = self.memory, self._step
        if self._extra_steps is None or memory.economics.is_disabled:
            return memory.economics.is_disabled
        extra = step.from_first(self._extra_steps(memory.counts.progress - self._progress))
        attempts = memory.counts.attempts
        probes = FEWEST_PROBES * memory.counts.in_batches(step.tokens_of(self._search_documents))
        attempt = max(0.0, extra / attempts) if attempts else probes / self._step_cost
        num_steps = step.index + step.steps_left
        if extra + attempt <= GATE * num_steps:
            return False
        text = (
            f"by the clock predictions have made this run {extra / num_steps:.1%} slower, and another attempt would "
            f"add about {attempt / num_steps:.1%}; allowed: {GATE:.0%}. Every further step is an ordinary one"
        )
        details = {"because": "clock", "extra_steps": extra, "allowed_steps": GATE * num_steps}
        self._log("hybrid_disabled", text, **details)
        self._remember(economics=memory.economics.closed(step.index))
        self._has_closed = True
        return True

    # --- predictions ------------------------------------------------------------------------------------------------

    def _predict(self) -> Outcome | None:
        """Search along the velocity. Return the outcome of an accepted prediction, or None."""
        self._read_output()
        window, settings = self.memory.window, self._settings
        if window is None:  # a warning has just ended it
            return None
        if self.memory.attempt is not None and self._is_closed():  # before another one in a row
            return None
        # Only where it is allowed, and worth its probes, does the search cost a forward pass.
        weights_P = self._weights()
        velocity_P = self._direction(window) if self._direction else window.velocity()
        worth = self._worth_by_rate()
        taus = self._allowed(weights_P, velocity_P, worth)
        if not taus or window.consistency(weights_P) <= 0:
            return None

        def at(tau: int) -> np.ndarray:
            return weights_P + np.float32(worth[tau]) * velocity_P

        # What a computed step has gained lately is the measure: a predicted one must gain a share of it.
        passed = window.half + (self.memory.attempt.steps if self.memory.attempt else 0)
        with offloaded(self._step.engine, settings.offload):
            now_D = self._losses(self._search_documents)
            gain_D = (self._losses(self._search_documents, window.middle_P) - now_D) / passed
            result = line_search(
                lambda tau: self._losses(self._search_documents, at(tau)), now_D, gain_D, taus, worth.__getitem__,
                settings.correction_interval,
            )  # fmt: skip
        if not self._is_accepted(result):
            return None
        assert result.losses_D is not None
        return self._jump(result, weights_P, at(result.tau), float((now_D - result.losses_D).mean()))

    def _worth_by_rate(self) -> list[float]:
        """Return E_τ for every τ from 0 to the horizon: how many steps of the window a step ahead is worth."""
        assert self.memory.window is not None
        passed = self.memory.attempt.steps if self.memory.attempt else 0  # since the end of the window
        mean_rate = sum(self._step.rate(-i - passed) for i in range(1, self.memory.window.half + 1))
        mean_rate /= self.memory.window.half
        horizon = self.memory.economics.horizon
        skips = self._settings.skips_steps
        rates = (self._step.rate(tau if skips else 0) for tau in range(horizon))
        return [0.0, *reach(rates, mean_rate)]

    def _allowed(self, weights_P: np.ndarray, velocity_P: np.ndarray, worth: list[float]) -> list[int]:
        """Return the distances that may be tried; none if even the farthest would not pay for its probes.

        A distance outside of the trust region is not tried. It is not shortened either: the steps that it would skip
        would then be paid for and not made.
        """
        settings, step, memory = self._settings, self._step, self.memory
        most = memory.economics.horizon
        room = step.steps_left - settings.correct_steps - 1  # the check has to come before the end
        most = min(most, room, step.max_steps) if settings.skips_steps else (most if room >= 0 else 0)
        assert memory.start is not None
        entry_P = flatten(memory.snapshot.weights) if memory.snapshot else weights_P
        radius = settings.trust_region * norm(entry_P - flatten(memory.start))
        moved, speed = norm(weights_P - entry_P), norm(velocity_P)
        taus = [tau for tau in distances(most, settings.correction_interval) if moved + worth[tau] * speed <= radius]
        cost = FEWEST_PROBES * memory.counts.in_batches(step.tokens_of(self._search_documents))
        return taus if taus and speed and taus[-1] * self._step_cost > cost else []

    def _is_accepted(self, result: SearchResult) -> bool:
        """Count an attempt, and return whether there is evidence for it, and enough to pay for its check."""
        memory, settings = self.memory, self._settings
        probed = (2 + result.num_probed) * self._step.tokens_of(self._search_documents)
        check_cost = 2 * memory.counts.in_batches(self._step.tokens_of(self._check_documents))
        pays = result.tau * self._step_cost > check_cost
        accepted = result.tau > 0 and pays and result.confidence >= settings.confidence_threshold
        counts = memory.counts.plus(attempts=1, accepted=int(accepted), micro_corrections=result.num_micro_corrections)
        self._remember(counts=counts, confidence=result.confidence)
        if memory.attempt is not None:
            self._remember(attempt=replace(memory.attempt, probe_tokens=memory.attempt.probe_tokens + probed))
        elif not accepted:
            economics = memory.economics.after_attempt(0.0, memory.counts.in_batches(probed)).after_failure()
            self._close(economics)
        if not accepted:
            text = f"confidence {result.confidence:.2f} in {_steps(result.tau)}; the step is an ordinary one"
            self._log("not_predicted", text, confidence=result.confidence, steps=result.tau)
        return accepted

    def _jump(self, result: SearchResult, before_P: np.ndarray, after_P: np.ndarray, gain: float) -> Outcome:
        """Set the weights to exactly `after_P`, as the last thing in this step, so that nothing is left half done."""
        engine, settings, memory = self._step.engine, self._settings, self.memory
        assert memory.start is not None
        if memory.attempt is None:
            self._begin_attempt()
        # A series of jumps is one attempt: it is checked, paid for and undone as a whole.
        attempt = self.memory.attempt
        assert attempt is not None
        predicted = None if attempt.predicted_loss is None else attempt.predicted_loss - gain
        attempt = replace(attempt, jumps=attempt.jumps + 1, steps=attempt.steps + result.tau, predicted_loss=predicted)
        skipped = result.tau if settings.skips_steps else 0
        counts = self.memory.counts.plus(virtual_steps=result.tau, predict=skipped)
        self._remember(attempt=attempt, counts=counts)
        again = skipped and result.at_bound and attempt.jumps < settings.max_consecutive_predicts
        self._enter(PREDICT if again else CORRECT)
        details = {
            "steps": result.tau,
            "confidence": result.confidence,
            "gain": gain,
            "change": norm(after_P - before_P),
        }
        self._log("predicted", f"{_steps(result.tau)} ahead, confidence {result.confidence:.2f}", **details)
        if not skipped:
            return self._ordinary_from(ReturnPoint(split(after_P, memory.start), engine.optimizer_state()))
        engine.load_adapter_state(split(after_P, memory.start))
        return Outcome(None, skipped, self._events(skipped))

    def _begin_attempt(self) -> None:
        """Remember what the check after the correction needs: losses of the other probe set, and the way back."""
        engine, monitor = self._step.engine, self.memory.monitor
        losses = tuple(self._losses(self._check_documents).tolist())
        tokens = 2 * self._step.tokens_of(self._check_documents)
        snapshot = ReturnPoint(engine.adapter_state(), engine.optimizer_state())
        predicted = monitor.recent_loss if monitor.is_ready else None
        self._remember(attempt=Prediction(0, 0, tokens, losses, predicted), snapshot=snapshot)

    # --- the check --------------------------------------------------------------------------------------------------

    def _check(self) -> ReturnPoint | None:
        """Compare the other probe set with its losses before the prediction. Return where to go back to, or None."""
        memory, settings = self.memory, self._settings
        attempt, snapshot = memory.attempt, memory.snapshot
        assert attempt is not None and snapshot is not None
        # The search has chosen by its own documents, so others judge.
        undone = attempt.is_critical
        if not undone:
            undone = is_worse(np.array(attempt.check_losses), self._losses(self._check_documents))
            self._remember(counts=self.memory.counts.plus(divergences=int(undone)))
        cost = self.memory.counts.in_batches(attempt.probe_tokens)
        if undone:
            economics = memory.economics.after_attempt(0.0, cost + settings.correct_steps * self._step_cost)
            self._close(economics.after_failure())
            self._remember(counts=self.memory.counts.plus(undone=1, undone_steps=attempt.steps))
        else:
            economics = memory.economics.after_attempt(attempt.steps * self._step_cost, cost)
            self._close(economics.after_success())
        why = "a critical signal" if attempt.is_critical else "worse by more than one standard error"
        text = (
            f"the prediction of {_steps(attempt.steps)} is undone: {why}"
            if undone
            else "the prediction passed its check"
        )
        self._log("prediction_undone" if undone else "prediction_kept", text, steps=attempt.steps)
        self._enter(FULL)
        return snapshot if undone else None

    def _close(self, economics: Any) -> None:
        """End an attempt, and say so if it was the last one of the run."""
        if economics.is_disabled and not self.memory.economics.is_disabled:
            text = "predictions do not pay in this run: every further step is an ordinary one"
            self._log("hybrid_disabled", text, because="cost")
        self._remember(economics=economics, attempt=None, snapshot=None)

    def _ordinary_from(self, place: ReturnPoint) -> Outcome:
        """Take an ordinary step from other weights and optimizer state. If that fails, the engine is as it was."""
        with _restoring(self._step):
            self._step.engine.load_adapter_state(place.weights)
            self._step.engine.load_optimizer_state(place.optimizer)
            return self._ordinary()

    # --- small things -----------------------------------------------------------------------------------------------

    def _remember(self, **changes: Any) -> None:
        self.memory = replace(self.memory, **changes)

    def _enter(self, phase: TrainingPhase) -> None:
        steps = {FULL: self._settings.full_steps, CORRECT: self._settings.correct_steps}.get(phase, 0)
        self._remember(stage=self.memory.stage.enter(phase, steps))
        if phase is FULL or phase is CORRECT:
            self._remember(window=None)

    def _weights(self) -> np.ndarray:
        self.is_plain = False
        return flatten(self._step.engine.adapter_state())

    def _losses(self, documents: Any, weights_P: np.ndarray | None = None) -> np.ndarray:
        """Return the losses of probe documents, with the engine's weights or others, and count their cost."""
        counts = self.memory.counts
        self.is_plain = False
        self._remember(counts=counts.plus(probe_tokens=self._step.tokens_of(documents)))
        if weights_P is None:
            return self._step.document_losses(documents)
        assert self.memory.start is not None
        with self._step.trying(split(weights_P, self.memory.start)):
            return self._step.document_losses(documents)

    def _log(self, event: str, message: str, **details: Any) -> None:
        self._noted.append((event, message, details))

    def _events(self, num_steps: int) -> tuple[Event, ...]:
        return tuple(Event(self._step.index + num_steps, *event) for event in self._noted)


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


@contextlib.contextmanager
def _restoring(step: StepActions) -> Generator[None]:
    """Put weights and optimizer state back if the block raises, also for a stop request."""
    weights, optimizer = step.engine.adapter_state(), step.engine.optimizer_state()
    try:
        yield
    except BaseException:
        step.engine.load_adapter_state(weights)
        step.engine.load_optimizer_state(optimizer)
        raise
