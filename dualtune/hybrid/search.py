"""The line search: how far along the velocity the probe documents improve, with forward passes only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dualtune.hybrid.confidence import confidence

WORTH = 0.5  # a predicted step must gain at least this share of what a computed one did


def distances(most: int, interval: int) -> list[int]:
    """Return the steps to try, up to `most`: 1, 2, 4, 8, … below `interval`, then its multiples."""
    found: list[int] = []
    tau = 1
    while tau <= most:
        found.append(tau)
        tau = min(2 * tau, interval) if tau < interval else tau + interval
    return found


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
    asked_D = WORTH * step_gain_D if float(step_gain_D.mean()) > 0 else np.zeros_like(step_gain_D)
    for tau in taus:
        losses_D = losses_at(tau)
        probed += 1
        micro += tau % interval == 0
        gains_D = now_D - losses_D - worth_steps(tau) * asked_D
        gain = float(gains_D.mean())
        if not gain > best_gain:  # also if NaN
            break
        best_gain = gain
        best = SearchResult(tau, confidence(gains_D), losses_D, tau == taus[-1])
    return SearchResult(best.tau, best.confidence, best.losses_D, best.at_bound, probed, micro)
