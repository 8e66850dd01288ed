"""The phases of predictive training, as a transition table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType


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
