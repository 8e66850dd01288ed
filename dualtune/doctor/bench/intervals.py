"""Means and paired differences over seeds, with their 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t, two-sided 95 %, by degrees of freedom; from 31 on the value for 30, which is a little too careful.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with half the width of its 95 % interval; None for a single value, which has none."""

    mean: float
    margin: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.margin is not None and abs(self.mean) > self.margin

    def as_json(self) -> dict[str, float | None]:
        return {"mean": self.mean, "margin_95": self.margin}


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values and its 95 % interval by Student's t distribution."""
    n = len(values)
    margin = _T_95[min(n - 1, len(_T_95)) - 1] * stdev(values) / math.sqrt(n) if n > 1 else None
    return Interval(fmean(values), margin)


def paired(mine: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the interval of the differences mine − other, pair by pair. ValueError if the numbers of values differ."""
    return interval([a - b for a, b in zip(mine, other, strict=True)])
