"""Averages of the weights of a run, on top of any optimizer.

The average is kept as its offset from the weights, a slot that is zero before the first update: an engine adds one line
to its update, and training itself is bitwise what it is without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the config imports this file, and starts without NumPy
    import numpy as np

OFFSET = "offset"  # the slot: average − weights


@dataclass(frozen=True, slots=True)
class Averaging:
    """An average of the weights after each update. Updates up to number `start` do not count.

    `least` is the smallest share of the newest weights. 0: all have the same share, the mean of the tail of a run
    (Polyak & Juditsky 1992; latest weight averaging, arXiv 2306.03241). 1 / n: an exponential moving average with the
    time constant n, which begins as a mean, so the first weights do not stay in it.
    """

    start: int = 0
    least: float = 0.0

    def share(self, step: int) -> float:
        """Return the share of the weights after update number `step`, counted from 1, in the new average."""
        return 1.0 if step <= self.start else max(self.least, 1 / (step - self.start))

    def update(self, offset: np.ndarray, change: np.ndarray, step: int) -> np.ndarray:
        """Return the offset after update number `step`, which has added `change` to the weights.

        average ← (1 − c)·average + c·w, both minus the new w: offset ← (1 − c)·(offset − change).
        """
        return (1 - self.share(step)) * (offset - change)


def averaging(kind: str, over: int, num_steps: int) -> Averaging | None:
    """Return the average that train.average = `kind` asks for, over `over` of `num_steps` updates; None for none."""
    match kind:
        case "none":
            return None
        case "tail":
            return Averaging(start=max(0, num_steps - over))
        case "ema":
            return Averaging(least=1 / over)
        case _:
            raise ValueError(f"train.average: got '{kind}', allowed: none, ema, tail")
