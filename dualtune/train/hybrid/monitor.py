"""The phases of predictive training, and the monitor of divergence that ends a phase early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from itertools import pairwise
from types import MappingProxyType

# ----------------------------------------------------------------------------------------------------------------------
# The phases of predictive training, as a transition table.


class TrainingPhase(StrEnum):
    """What the next step is: ordinary in warmup, full and correct; predicted, if there is evidence, in predict."""

    WARMUP = "warmup"
    FULL = "full"
    PREDICT = "predict"
    CORRECT = "correct"


_WARMUP, _FULL, _PREDICT, _CORRECT = TrainingPhase
TRANSITIONS: Mapping[TrainingPhase, frozenset[TrainingPhase]] = MappingProxyType(
    {
        _WARMUP: frozenset({_FULL}),  # so the first full phase cannot be left out
        _FULL: frozenset({_FULL, _PREDICT}),
        _PREDICT: frozenset({_PREDICT, _CORRECT, _FULL}),  # another prediction in a row; corrected; none accepted
        _CORRECT: frozenset({_FULL}),
    }
)


class IllegalTransition(ValueError):
    """A phase that may not follow the present one."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a run is: its phase, and how many ordinary steps are left in it."""

    phase: TrainingPhase = TrainingPhase.WARMUP
    left: int = 0
    forced: int = 0  # ordinary steps that the next full phase has at least

    def enter(self, phase: TrainingPhase, steps: int = 0) -> Stage:
        """Return the stage after a transition into a phase of `steps` ordinary steps. IllegalTransition."""
        if phase not in TRANSITIONS[self.phase]:
            allowed = ", ".join(sorted(TRANSITIONS[self.phase]))
            raise IllegalTransition(f"phase {phase} after {self.phase}; allowed: {allowed}")
        if phase is TrainingPhase.FULL:
            return Stage(phase, max(steps, self.forced))
        return Stage(phase, steps, self.forced)

    def stepped(self) -> Stage:
        """Return the stage after an ordinary step."""
        return replace(self, left=self.left - 1)

    def forcing_full(self, steps: int) -> Stage:
        """Return the stage with at least `steps` full steps: from now on, or when a full phase begins next.

        A prediction that waits for its check is checked all the same.
        """
        if self.phase is TrainingPhase.FULL:
            return replace(self, left=max(self.left, steps))
        return replace(self, forced=max(self.forced, steps))


# ----------------------------------------------------------------------------------------------------------------------
# The monitor: signals in the losses and gradient norms of computed steps, and in how predictions did.

DECAY = 0.95  # of the running means: about the last 20 steps
FEWEST = 10  # steps before a mean is trusted
EXPLODED, VANISHED = 10.0, 0.01  # gradient norm against its mean
WRONG, FAR_WRONG = 0.2, 0.5  # |predicted − actual| / |actual| loss
RECENT = 8  # losses in which oscillation is looked for
ESCALATION = 3  # warnings in a row that are critical


class Level(IntEnum):
    """How bad it is. Critical undoes a prediction that waits for its check."""

    NORMAL, CAUTION, WARNING, CRITICAL = range(4)


class SignalKind(StrEnum):
    """What may be wrong with a computed step."""

    LOSS = "loss above its band"
    EXPLODING = "exploding gradient"
    VANISHING = "vanishing gradient"
    NONFINITE = "not finite"
    PREDICTION = "prediction error"
    OSCILLATION = "oscillating loss"


@dataclass(frozen=True, slots=True)
class Signal:
    """Something that the monitor noticed."""

    kind: SignalKind
    level: Level
    message: str


@dataclass(frozen=True, slots=True)
class Monitor:
    """What is remembered of the computed steps, and how many signals there were."""

    number: int = 0  # of steps with finite numbers
    loss: float = 0.0  # exponential moving averages: of the loss,
    variance: float = 0.0  # of its squared distance from that,
    grad_norm: float = 0.0  # and of the gradient norm
    recent: tuple[float, ...] = ()  # losses
    warnings: int = 0  # signals in a row of level warning or above
    counts: tuple[int, ...] = (0, 0, 0, 0)  # signals so far, by level

    @property
    def is_ready(self) -> bool:
        """Whether the means are trusted."""
        return self.number >= FEWEST

    @property
    def recent_loss(self) -> float:
        """The mean of the last losses, which lags less than `loss`."""
        return sum(self.recent) / len(self.recent)

    def observe(self, loss: float, grad_norm: float, threshold: float) -> tuple[Monitor, Signal | None]:
        """Return the monitor after a computed step, and the worst signal in it.

        `threshold`: how many standard deviations above its mean a loss may be. Only a rise is a divergence.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._noted(Signal(SignalKind.NONFINITE, Level.CRITICAL, f"loss {loss}, gradient norm {grad_norm}"))
        recent = (*self.recent, loss)[-RECENT:]
        signals = [self._band(loss, threshold), self._gradient(grad_norm), self._oscillation(recent, threshold)]
        worst = max((signal for signal in signals if signal), key=lambda signal: signal.level, default=None)
        return replace(self._averaged(loss, grad_norm), recent=recent)._noted(worst)

    def compare(self, predicted: float, actual: float) -> tuple[Monitor, Signal | None]:
        """Return the monitor after the loss of a step became known, and a signal if its prediction was far off.

        Both are losses: an accurate prediction has the error 0, whatever the loss is. A loss below its prediction does
        no harm, however far: where the loss falls fast, every prediction from the losses before is too high.
        """
        error = prediction_error(predicted, actual)
        if error <= WRONG:
            return self, None
        level = Level.WARNING if error <= FAR_WRONG else Level.CRITICAL  # NaN is critical
        if actual < predicted:
            level = Level.CAUTION
        text = f"loss {actual:.4g}, predicted {predicted:.4g}: {error:.0%} off"
        return self._noted(Signal(SignalKind.PREDICTION, level, text))

    def _band(self, loss: float, threshold: float) -> Signal | None:
        deviation = math.sqrt(self.variance)
        if not self.is_ready or loss <= self.loss + threshold * deviation:
            return None
        level = Level.WARNING if loss <= self.loss + 2 * threshold * deviation else Level.CRITICAL
        return Signal(SignalKind.LOSS, level, f"loss {loss:.4g}, mean {self.loss:.4g} ± {deviation:.2g}")

    def _gradient(self, grad_norm: float) -> Signal | None:
        text = f"gradient norm {grad_norm:.3g}, mean {self.grad_norm:.3g}"
        if self.is_ready and grad_norm > EXPLODED * self.grad_norm:
            return Signal(SignalKind.EXPLODING, Level.CRITICAL, text)
        if self.is_ready and grad_norm < VANISHED * self.grad_norm:
            return Signal(SignalKind.VANISHING, Level.CAUTION, text)
        return None

    def _oscillation(self, recent: tuple[float, ...], threshold: float) -> Signal | None:
        """Return a signal if the loss changes its direction every time, by more than the band.

        Independent losses change by 1.1 standard deviations on average, so noise does not pass the band.
        """
        changes = [b - a for a, b in pairwise(recent)]
        alternates = all(a * b < 0 for a, b in pairwise(changes))
        if not self.is_ready or len(recent) < RECENT or not alternates:
            return None
        swing = sum(map(abs, changes)) / len(changes)
        if swing <= threshold * math.sqrt(self.variance) and swing <= WRONG * abs(self.loss):
            return None
        return Signal(SignalKind.OSCILLATION, Level.CAUTION, f"the loss swings by {swing:.3g} with every step")

    def _averaged(self, loss: float, grad_norm: float) -> Monitor:
        decay = min(DECAY, self.number / (self.number + 1))  # a plain mean at first
        distance = loss - self.loss if self.number else 0.0
        return replace(
            self,
            number=self.number + 1,
            loss=decay * self.loss + (1 - decay) * loss,
            variance=decay * (self.variance + (1 - decay) * distance**2),  # West, 1979
            grad_norm=decay * self.grad_norm + (1 - decay) * grad_norm,
        )

    def _noted(self, signal: Signal | None) -> tuple[Monitor, Signal | None]:
        """Count a signal. The last of `ESCALATION` warnings in a row becomes critical; anything less ends the row."""
        if signal is None or signal.level < Level.WARNING:
            counted = self if signal is None else replace(self, counts=_one_more(self.counts, signal.level))
            return replace(counted, warnings=0), signal
        warnings = self.warnings + 1
        if warnings >= ESCALATION and signal.level is Level.WARNING:
            signal = replace(signal, level=Level.CRITICAL, message=f"{signal.message}; {warnings} warnings in a row")
        return replace(self, warnings=warnings, counts=_one_more(self.counts, signal.level)), signal


def prediction_error(predicted: float, actual: float) -> float:
    """Return |predicted − actual| / |actual|."""
    return abs(predicted - actual) / max(abs(actual), 1e-12)


def _one_more(counts: tuple[int, ...], level: Level) -> tuple[int, ...]:
    return tuple(count + (at == level) for at, count in enumerate(counts))
