"""The base against its adapter on the same rows: differences with paired confidence intervals of 95 %.

Shares of right answers: method 10 of Newcombe, Improved confidence intervals for the difference between binomial
proportions based on paired data, Statistics in Medicine 17 (1998), with Wilson's score intervals; it also holds where
all rows agree. Losses and other numbers: the paired bootstrap, by rows (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13: percentiles; for language models Koehn, EMNLP 2004). Shape suffix: N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # of the normal distribution, for 95 %
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """One metric of both. The interval is of the difference, adapter minus base; None for one row, or if not finite."""

    metric: str
    base: float
    adapter: float
    difference: float
    low: float | None
    high: float | None
    rows: int
    method: str  # of the interval: "newcombe" or "bootstrap"

    @property
    def verdict(self) -> str:
        """Return what the interval says, in words."""
        if self.low is None or self.high is None:
            return "too few rows" if self.rows < 2 else "not finite"
        return "adapter higher" if self.low > 0 else "adapter lower" if self.high < 0 else "no difference shown"


def compare_losses(base_N2: np.ndarray, adapter_N2: np.ndarray) -> PairedComparison:
    """Compare losses, each given as the sum over a row's targets and the row's total weight.

    The loss of either is Σ sums / Σ weights, so a row counts by its target tokens.
    """
    weighs = base_N2[:, 1] > 0
    weights_N = base_N2[weighs, 1]
    return _bootstrapped("loss", base_N2[weighs, 0] / weights_N, adapter_N2[weighs, 0] / weights_N, weights_N)


def compare_scores(metric: str, base_N: np.ndarray, adapter_N: np.ndarray) -> PairedComparison:
    """Compare scores by row: bool for right and wrong, float64 for numbers."""
    if base_N.dtype != bool or adapter_N.dtype != bool:
        return _bootstrapped(metric, base_N.astype(np.float64), adapter_N.astype(np.float64), np.ones(len(base_N)))
    base, adapter = float(base_N.mean()), float(adapter_N.mean())
    low, high = newcombe(base_N, adapter_N) if len(base_N) > 1 else (None, None)
    return PairedComparison(metric, base, adapter, adapter - base, low, high, len(base_N), "newcombe")


def newcombe(base_N: np.ndarray, adapter_N: np.ndarray) -> tuple[float, float]:
    """Return Newcombe's interval of the difference of two shares of the same rows, adapter minus base."""
    n = len(base_N)
    both, none = int((base_N & adapter_N).sum()), int((~base_N & ~adapter_N).sum())
    only_adapter, only_base = int((adapter_N & ~base_N).sum()), int((base_N & ~adapter_N).sum())
    p1, p2 = (both + only_adapter) / n, (both + only_base) / n
    (low1, high1), (low2, high2) = _wilson(p1, n), _wilson(p2, n)
    margins = (both + only_adapter) * (only_base + none) * (both + only_base) * (only_adapter + none)
    product = both * none - only_adapter * only_base
    corrected = max(product - n / 2, 0.0) if product > 0 else product
    phi = corrected / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p1 - p2 - reach(p1 - low1, high2 - p2), p1 - p2 + reach(high1 - p1, p2 - low2)


def _wilson(p: float, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share (Journal of the American Statistical Association 22, 1927)."""
    middle, half = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return (middle - half) / (1 + Z * Z / n), (middle + half) / (1 + Z * Z / n)


def _bootstrapped(metric: str, base_N: np.ndarray, adapter_N: np.ndarray, weights_N: np.ndarray) -> PairedComparison:
    """Compare weighted means: rows are drawn with replacement, the same for both. The same rows give the same draws."""
    n = len(weights_N)
    base, adapter = (float((weights_N * x_N).sum() / weights_N.sum()) for x_N in (base_N, adapter_N))
    low = high = None
    if n > 1 and math.isfinite(adapter - base):
        gains_N, rng = weights_N * (adapter_N - base_N), np.random.default_rng([n, 7])
        drawn = (rng.integers(0, n, n) for _ in range(RESAMPLES))
        found = [float(gains_N[rows].sum() / weights_N[rows].sum()) for rows in drawn]
        low, high = map(float, np.percentile(found, (2.5, 97.5)))
    return PairedComparison(metric, base, adapter, adapter - base, low, high, n, "bootstrap")
