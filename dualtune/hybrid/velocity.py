"""The velocity of the weights: a least-squares line through their last snapshots.

A window of 2W steps ends where a prediction may begin. Its first half only says whether the weights keep their
direction; through the W snapshots of the second half goes the line, whose slope is the velocity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dualtune.hybrid.vectors import cosine

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
    found: list[float] = []
    total = 0.0
    for rate in rates:
        total += rate / mean_rate
        found.append(total)
    return found
