"""Fault points: places where a test may have this process killed, as a crash or a power cut would.

DUALTUNE_FAULT=<point>:<n> kills the process (SIGKILL) when it reaches the point for the n-th time; `write:<n>` kills it
when n bytes of checkpoints and adapters have been written. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def allowed(point: str, amount: int) -> int:
    """How much of `amount` may be done at this point before the process is to be killed there."""
    name, _, limit = os.environ.get("DUALTUNE_FAULT", "").partition(":")
    if name != point:
        return amount
    left = int(limit) - _passed[point]
    _passed[point] += amount
    return max(0, min(amount, left))


def reach(point: str) -> None:
    """Die here, if this is the n-th time and the n-th time is fatal."""
    name, _, limit = os.environ.get("DUALTUNE_FAULT", "").partition(":")
    if name == point:
        _passed[point] += 1
        if _passed[point] == int(limit):
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
