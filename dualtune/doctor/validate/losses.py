"""Checks of a list of losses, and the metrics of a run in one object: for tests of training, here and elsewhere."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from dualtune.base.text import in_time


@dataclass(frozen=True, slots=True)
class Decrease:
    """The mean of the first losses, of the last ones, and the decrease between them."""

    first: float
    last: float

    @property
    def share(self) -> float:
        """0.3 where the loss fell by 30 %; NaN where a loss is not finite or the first mean is not positive."""
        is_finite = math.isfinite(self.first) and math.isfinite(self.last)
        return 1 - self.last / self.first if is_finite and self.first > 0 else math.nan

    def __str__(self) -> str:
        return f"{self.first:.4f} → {self.last:.4f} ({100 * self.share:.1f}% decrease)"


def decrease_of(losses: Sequence[float], window: int = 10) -> Decrease:
    """Return the means over the first and the last `window` losses. ValueError if the two windows overlap."""
    if len(losses) < 2 * window:
        raise ValueError(f"got {len(losses)} losses, must be at least two windows of {window}")
    return Decrease(fmean(losses[:window]), fmean(losses[-window:]))


def window_means(losses: Sequence[float], window: int = 50) -> list[float]:
    """Return the mean of each complete window, in order."""
    return [fmean(losses[i : i + window]) for i in range(0, len(losses) - window + 1, window)]


def largest_rise(means: Sequence[float]) -> float:
    """Return the largest relative increase from one mean to the next: 0.02 is 2 %; below 0 means no increase.

    NaN if a mean is not finite and positive; ValueError for fewer than two means.
    """
    if len(means) < 2:
        raise ValueError(f"got {len(means)} means, must be at least 2")
    if not all(math.isfinite(mean) and mean > 0 for mean in means):
        return math.nan
    return max(after / before - 1 for before, after in pairwise(means))


def assert_loss_convergence(losses: Sequence[float], min_decrease: float = 0.30, window: int = 10) -> None:
    """Raise AssertionError unless the mean of the last `window` losses is `min_decrease` below that of the first.

    A list shorter than two windows is split in halves, with a warning: there noise has more influence.
    """
    decrease = decrease_of(losses, _fitting(len(losses), window))
    if not decrease.share >= min_decrease:  # NaN fails
        raise AssertionError(
            f"the loss did not decrease enough: {decrease}, must be at least {100 * min_decrease:.1f}%"
        )


def assert_monotonic_decrease(losses: Sequence[float], tolerance: float, window: int = 50) -> None:
    """Raise AssertionError if the mean of a window exceeds the previous one by more than `tolerance`, a share of it.

    Means are compared, because with stochastic gradients the losses of single steps sometimes rise. A list shorter than
    two windows is split in halves, with a warning.
    """
    means = window_means(losses, _fitting(len(losses), window))
    rise = largest_rise(means)
    if not rise <= tolerance:
        shown = ", ".join(f"{mean:.4f}" for mean in means)
        raise AssertionError(f"the loss rose by {100 * rise:.1f}%, allowed: {100 * tolerance:.1f}%. Means: {shown}")


def _fitting(count: int, window: int) -> int:
    """Return the window, or half the length of a list that is shorter than two windows."""
    if window < 1:
        raise ValueError(f"window: got {window}, must be >= 1")
    if count < 2:
        raise ValueError(f"got {count} losses, must be at least 2")
    if count >= 2 * window:
        return window
    warnings.warn(f"{count} losses are fewer than two windows of {window}: comparing halves instead", stacklevel=3)
    return count // 2


@dataclass(slots=True)
class TrainingMetrics:
    """The losses, times and memory of a run, collected step by step."""

    losses: list[float] = field(default_factory=lambda: [])
    step_times_ms: list[float] = field(default_factory=lambda: [])
    peak_memory_bytes: int = 0

    def record(self, loss: float, step_time_ms: float, memory_bytes: int = 0) -> None:
        """Add a step."""
        self.losses.append(loss)
        self.step_times_ms.append(step_time_ms)
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes)

    @property
    def average_loss(self) -> float:
        """NaN before the first step, like the average time."""
        return fmean(self.losses) if self.losses else math.nan

    @property
    def average_step_time_ms(self) -> float:
        return fmean(self.step_times_ms) if self.step_times_ms else math.nan

    @property
    def total_time_s(self) -> float:
        return sum(self.step_times_ms) / 1000

    def summary(self) -> str:
        """A line for each number."""
        if not self.losses:
            return "steps         0"
        first, last = self.losses[0], self.losses[-1]
        lines = [
            f"steps         {len(self.losses)} in {in_time(self.total_time_s, 1)}",
            f"loss          {first:.4f} first, {last:.4f} last, {self.average_loss:.4f} average",
            f"step time     {self.average_step_time_ms:.1f} ms average",
            f"peak memory   {self.peak_memory_bytes / 1e6:.1f} MB",
        ]
        return "\n".join(lines)

    def print_summary(self) -> None:
        print(self.summary())
