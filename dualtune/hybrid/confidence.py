"""How sure it is that a prediction helps: the paired t statistic of probe documents, and whether it was right."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


def mean_and_error(differences_D: np.ndarray) -> tuple[float, float]:
    """Return mean(d) and its standard error sd(d)/√n over the documents; the error is 0 for fewer than two."""
    n = len(differences_D)
    error = float(differences_D.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return float(differences_D.mean()), error


def confidence(gains_D: np.ndarray) -> float:
    """Return the probability that the mean gain is positive: Φ(t), t = mean(d) / (sd(d)/√n). NaN counts as 0.

    The documents are the same before and after, so what differs between documents cancels. With n = 8 the normal
    distribution is a little more certain than Student's; `calibration` measures by how much.
    """
    mean, error = mean_and_error(gains_D)
    if not math.isfinite(mean) or not math.isfinite(error):
        return 0.0
    if error == 0:
        return 1.0 if mean > 0 else 0.0
    return 0.5 * (1 + math.erf(mean / error / math.sqrt(2)))


def is_worse(before_D: np.ndarray, after_D: np.ndarray) -> bool:
    """Return whether the losses of the documents rose by more than one standard error, or are not finite."""
    mean, error = mean_and_error(after_D - before_D)
    return not mean <= error  # also if NaN


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Predictions of similar confidence."""

    low: float
    high: float
    number: int
    mean_confidence: float
    share_better: float  # of them, that were better by other documents: equal to the confidence, if that is honest


def calibration(pairs: Iterable[tuple[float, bool]], num_bins: int = 5) -> list[CalibrationBin]:
    """Return (confidence, was it better) pairs in bins of equal width, without empty ones."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for sure, better in pairs:
        bins[min(int(sure * num_bins), num_bins - 1)].append((sure, better))
    return [
        CalibrationBin(
            at / num_bins, (at + 1) / num_bins, len(found),
            sum(sure for sure, _ in found) / len(found), sum(better for _, better in found) / len(found),
        )
        for at, found in enumerate(bins) if found
    ]  # fmt: skip
