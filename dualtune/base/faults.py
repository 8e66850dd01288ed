"""Fault points: places where a test may kill this process, as a crash or a power cut would.

DUALTUNE_FAULT=<point>:<n> kills the process (SIGKILL) when it reaches the point for the n-th time; `write:<n>` kills it
after n bytes of files that are written atomically (checkpoints, adapters, config.yaml …). Without the variable nothing
happens.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

# In the order of a save: bytes written; before and after the rename; before, during and after the removal of an old
# checkpoint. Then: an optimizer step is done; a file of a tree is removed (only in tests/chaos).
POINTS = ("write", "synced", "renamed", "prune", "doomed", "pruned", "step", "unlink")

_passed: Counter[str] = Counter()


def allowed(point: str, amount: int) -> int:
    """Return how much of `amount` may be done at this point before the process must be killed."""
    limit = _limit(point)
    if limit is None:
        return amount
    remaining = limit - _passed[point]
    _passed[point] += amount
    return max(0, min(amount, remaining))


def reach(point: str) -> None:
    """Kill the process if DUALTUNE_FAULT says so for this point and this time."""
    limit = _limit(point)
    if limit is not None:
        _passed[point] += 1
        if _passed[point] == limit:
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _limit(point: str) -> int | None:
    """Return the n of DUALTUNE_FAULT if it names this point. ValueError for an unknown point."""
    text = os.environ.get("DUALTUNE_FAULT")
    if not text:
        return None
    name, _, limit = text.partition(":")
    if name not in POINTS:
        raise ValueError(f"DUALTUNE_FAULT: got {text!r}, allowed: <point>:<n> with one of {', '.join(POINTS)}")
    return int(limit) if name == point else None
