"""Whether an attempt to predict is likely to pay: costs in forward passes of a batch, from token counts alone.

Wall time decides nothing, because a resumed run must decide like the uninterrupted one, and all processes alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARE = 0.3  # of the newest attempt in the running means
EXPLORED = 10  # one in so many opportunities that look unprofitable is tried all the same
MOST_UNPROFITABLE = 5  # attempts in a row, then no more in this run
FEWEST_PROBES = 3  # an attempt looks at the weights now, one window ago, and one step ahead
LONGEST_WAIT = 64  # opportunities


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

    def after_success(self) -> Economics:
        """Return the economics after a prediction that passed its check: go farther, wait less."""
        return replace(self, horizon=min(2 * self.horizon, self.max_horizon), wait=max(1, self.wait // 2))

    def after_failure(self) -> Economics:
        """Return the economics after a prediction that was not accepted or undone: stay nearer, wait longer."""
        return replace(self, horizon=max(1, self.horizon // 2), wait=min(2 * self.wait, LONGEST_WAIT), waited=0)
