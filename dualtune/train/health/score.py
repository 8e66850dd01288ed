"""The score of a run: the one loss by which a sweep, a table and a picture compare it with others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

LAST_SHARE = 10  # the training loss at the end is the mean of this part of the steps: the last tenth


@dataclass(frozen=True, slots=True)
class Score:
    """A loss in nats per token. None if it is not finite, or if nothing has been measured."""

    loss: float | None
    step: int  # after which it was measured; 0: nothing has been
    is_held_out: bool = False  # an evaluation, not a training loss

    @property
    def order(self) -> tuple[bool, float]:
        """What scores are sorted by: the lowest loss first, what has none last."""
        return (self.loss is None, 0.0 if self.loss is None else self.loss)

    @classmethod
    def of(cls, losses: Sequence[float], evals: Mapping[int, float], step: int, *, best: bool) -> Score:
        """Return the evaluation loss of the weights that a run writes; without one, the training loss at the end.

        `losses`: those of the steps, in order, up to `step`. `evals`: by step; that of the base model, step 0, does not
        count. `best`: the run writes the weights of its best evaluation (guards.restore_best), not the last ones.
        """
        after = {step: loss for step, loss in evals.items() if step > 0}
        if after:
            finite = {step: loss for step, loss in after.items() if math.isfinite(loss)}
            chosen = min(finite, key=lambda each: finite[each]) if best and finite else max(after)
            return cls(finite.get(chosen), chosen, is_held_out=True)
        loss = end_loss(losses)
        return cls(loss if loss is not None and math.isfinite(loss) else None, step if losses else 0)


def end_loss(losses: Sequence[float]) -> float | None:
    """Return the mean of the finite losses of the last tenth; NaN if the last one is not finite, None without any."""
    if not losses:
        return None
    last = losses[-max(1, len(losses) // LAST_SHARE) :]
    return fmean(filter(math.isfinite, last)) if math.isfinite(last[-1]) else math.nan
