"""What a check is, where it runs, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dualtune.backend import Backend
from dualtune.card import Card, Device, card_of
from dualtune.selftest.checks.sizes import Sizes
from dualtune.testing import tolerances

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """What a check found."""

    outcome: Outcome
    words: str  # what was found, in a sentence; of a skipped check, the reason
    figures: Mapping[str, Any] = field(default_factory=lambda: {})  # JSON values
    tolerance: Mapping[str, float] = field(default_factory=lambda: {})  # what the figures were judged by


@dataclass(frozen=True, slots=True)
class Site:
    """Where a check runs."""

    backend: Backend
    device: Device  # from the backend's card
    sizes: Sizes
    directory: Path  # empty; removed afterwards
    training: Mapping[str, str]  # keys of the config of short runs: model and data

    @property
    def card(self) -> Card:
        return card_of(self.backend.name)


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """One check. An exception that `run` raises counts as a failure."""

    name: str  # such as "kernels/norms float32"
    title: str
    run: Callable[[Site], CheckFinding]
    alone: bool = False  # whether it needs a process in which nothing else has run


def most_apart(dtype: str) -> float:
    """Return how far the losses of a short run may be from those of the same run elsewhere, in nats per token."""
    return tolerances.RESUMED_LOSS if dtype == "float32" else tolerances.LOSS_IN_16_BITS


def judged(figures: Mapping[str, float], tolerance: Mapping[str, float]) -> Outcome:
    """Return whether each figure that has a tolerance is within it. NaN is not."""
    return "passed" if all(figures[name] <= most for name, most in tolerance.items()) else "failed"
