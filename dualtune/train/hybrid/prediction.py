"""The arithmetic of a prediction: the velocity of the weights, the confidence in a step along it, and whether it pays.

Wall time decides nothing but whether predictions end early, because a resumed run must decide like the uninterrupted
one, and all processes alike: that one decision is remembered, and the run is saved with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dualtune.model.adapter import Tensors

# ----------------------------------------------------------------------------------------------------------------------
# Tensors of an adapter as one flat vector, and back.


def flatten(tensors: Tensors) -> np.ndarray:
    """Return all weights as one vector, float32 [P], in the order of the tensors' names."""
    return np.concatenate([tensors[name].astype(np.float32, copy=False).ravel() for name in sorted(tensors)])


def split(vector_P: np.ndarray, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a flat vector as tensors with the names and shapes of `like`; the inverse of `flatten`."""
    tensors: dict[str, np.ndarray] = {}
    end = 0
    for name in sorted(like):
        start, end = end, end + like[name].size
        tensors[name] = vector_P[start:end].reshape(like[name].shape)
    return tensors


def norm(vector_P: np.ndarray) -> float:
    """Return the L2 norm, summed in float64."""
    return float(np.sqrt(np.sum(np.square(vector_P, dtype=np.float64))))


def cosine(a_P: np.ndarray, b_P: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = norm(a_P) * norm(b_P)
    return float(np.sum(np.multiply(a_P, b_P, dtype=np.float64))) / lengths if lengths else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# The velocity of the weights: a least-squares line through their last snapshots.
#
# A window of 2W steps ends where a prediction may begin. Its first half only says whether the weights keep their
# direction; through the W snapshots of the second half goes the line, whose slope is the velocity.

W = 8  # steps in half a window


def half_window(full_steps: int) -> int:
    """Return the steps of half a window in a full phase of this length."""
    return min(W, full_steps // 2)


@dataclass(frozen=True, slots=True)
class Window:
    """The weights of a window so far, as flat float32 vectors [P].

    The slope is Σ (i − ī)(θ_i − θ_0) over the snapshots i = 1 … W, added up as they come, so that three vectors are
    kept instead of ten. Subtracting θ_0 changes nothing, because Σ (i − ī) = 0, and keeps the digits.
    """

    half: int
    first_P: np.ndarray  # 2W steps before the end
    middle_P: np.ndarray | None = None  # W steps before the end: θ_0
    slope_P: np.ndarray | None = None

    def needs(self, left: int) -> bool:
        """Return whether the weights with `left` steps to the end of the window belong to it."""
        return left <= self.half

    def with_snapshot(self, left: int, weights_P: np.ndarray) -> Window:
        """Return the window with the weights that have `left` steps to its end."""
        if left == self.half:
            return replace(self, middle_P=weights_P, slope_P=np.zeros_like(weights_P))
        assert self.middle_P is not None and self.slope_P is not None
        factor = np.float32((self.half - left) - (self.half + 1) / 2)
        return replace(self, slope_P=self.slope_P + factor * (weights_P - self.middle_P))

    def velocity(self) -> np.ndarray:
        """Return the change of the weights per step, float32 [P]: the least-squares slope."""
        assert self.slope_P is not None
        squares = sum((i - (self.half + 1) / 2) ** 2 for i in range(1, self.half + 1))
        return self.slope_P / np.float32(squares)

    def consistency(self, weights_P: np.ndarray) -> float:
        """Return the cosine between the changes of the two halves; `weights_P` are those at the window's end."""
        assert self.middle_P is not None
        return cosine(weights_P - self.middle_P, self.middle_P - self.first_P)


def reach(rates: Iterable[float], mean_rate: float) -> list[float]:
    """Return E_1, E_2, …: how many steps at the window's mean learning rate the next 1, 2, … steps are worth.

    E_τ = Σ_{j<τ} η(t+j) / η̄, so a prediction of τ steps follows the schedule. `rates` are η(t), η(t+1), …
    """
    totals: list[float] = []
    total = 0.0
    for rate in rates:
        total += rate / mean_rate
        totals.append(total)
    return totals


# ----------------------------------------------------------------------------------------------------------------------
# How sure it is that a prediction helps: the paired t statistic of probe documents, and whether it was right.


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
            at / num_bins, (at + 1) / num_bins, len(members),
            sum(sure for sure, _ in members) / len(members), sum(better for _, better in members) / len(members),
        )
        for at, members in enumerate(bins) if members
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Whether an attempt is likely to pay: costs in forward passes of a batch, from token counts alone.

SHARE = 0.3  # of the newest attempt in the running means
EXPLORED = 10  # one in so many opportunities that look unprofitable is tried all the same
MOST_UNPROFITABLE = 5  # attempts in a row, then no more in this run
FEWEST_PROBES = 3  # an attempt looks at the weights now, one window ago, and one step ahead
LONGEST_WAIT = 64  # opportunities
GATE = 0.03  # of the run's time without predictions: the most that they may make it slower


@dataclass(frozen=True, slots=True)
class Economics:
    """What attempts have brought and cost so far. Costs and gains are in forward passes of a training batch."""

    horizon: int  # the most steps that the next prediction may stand for
    max_horizon: int
    expected_gain: float  # of an attempt; at first that of the longest prediction, so that one failure decides nothing
    expected_cost: float = 0.0
    wait: int = 1  # an attempt is made at every so many-th opportunity
    waited: int = 0
    declined: int = 0  # opportunities that looked unprofitable
    unprofitable: int = 0  # attempts in a row
    is_disabled: bool = False
    closed_at: int | None = None  # the steps done when the clock has disabled it

    def at_opportunity(self) -> tuple[Economics, bool]:
        """Return the economics after an opportunity, and whether to make an attempt."""
        if self.is_disabled:
            return self, False
        if self.waited + 1 < self.wait:
            return replace(self, waited=self.waited + 1), False
        if self.expected_gain > self.expected_cost:
            return replace(self, waited=0), True
        declined = self.declined + 1
        return replace(self, declined=declined), declined % EXPLORED == 0

    def after_attempt(self, gain: float, cost: float) -> Economics:
        """Return the economics after an attempt that gained and cost this much; a failed one has gained nothing."""
        unprofitable = 0 if gain > cost else self.unprofitable + 1
        return replace(
            self,
            expected_gain=SHARE * gain + (1 - SHARE) * self.expected_gain,
            expected_cost=SHARE * cost + (1 - SHARE) * self.expected_cost,
            unprofitable=unprofitable,
            is_disabled=self.is_disabled or unprofitable >= MOST_UNPROFITABLE,
        )

    def closed(self, step: int) -> Economics:
        """Return the economics of a run in which the clock ends predictions after this many steps."""
        return replace(self, is_disabled=True, closed_at=step)

    def after_success(self) -> Economics:
        """Return the economics after a prediction that passed its check: go farther, wait less."""
        return replace(self, horizon=min(2 * self.horizon, self.max_horizon), wait=max(1, self.wait // 2))

    def after_failure(self) -> Economics:
        """Return the economics after a prediction that was not accepted or undone: stay nearer, wait longer."""
        return replace(self, horizon=max(1, self.horizon // 2), wait=min(2 * self.wait, LONGEST_WAIT), waited=0)
