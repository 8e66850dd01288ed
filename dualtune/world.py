"""The world of a run: the processes that train it together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

WAIT_VARIABLE, WAIT_S = "DUALTUNE_WAIT_S", 600.0


def wait_limit_s() -> float:
    """Return how long a process waits for the others of its world before they count as hung."""
    return float(os.environ.get(WAIT_VARIABLE, WAIT_S))


class World(Protocol):
    """The processes that train one run together. All of them call the same methods in the same order.

    In `optim_step` an engine of such a world sums loss and gradient over its processes, so adapter, optimizer and
    `StepOutput` are the same in each; the methods here are for the loop. EnvironmentFault if a process is gone.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every process, by rank. All give the same number of bytes. Does not synchronize."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Return the data of rank 0; the other processes give any data of the same length."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The world of a run in one process."""

    rank: int = 0
    size: int = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data
