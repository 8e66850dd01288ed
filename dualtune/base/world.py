"""The world of a run: the processes that train it together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from dualtune.base.errors import EnvironmentFault

WAIT_VARIABLE, WAIT_S = "DUALTUNE_WAIT_S", 600.0
MAX_WAIT_S = 1e7  # what all of torch and the threads of Python can wait
MAX_PROCESSES, MAX_PORT = 1 << 20, 1 << 16


def wait_limit_s() -> float:
    """Return how long a process waits for the others of its world before they count as hung."""
    text = os.environ.get(WAIT_VARIABLE) or str(WAIT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < MAX_WAIT_S:
        raise _wrong(WAIT_VARIABLE, text, f"seconds, above 0 and below {MAX_WAIT_S:g}")
    return seconds


def launched_number(name: str, default: int | None, below: int = MAX_PROCESSES) -> int:
    """Return the number in a variable that a launcher sets, such as RANK; or `default`, if there is one.

    EnvironmentFault unless it is an integer >= 0 and less than `below`: a rank beyond its world waits for ever.
    """
    text = os.environ.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < below):
        raise _wrong(name, text, f"an integer from 0 to {below - 1}")
    return int(text)


def _wrong(name: str, text: str, allowed: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{name}: got {text[:100]!r}, must be {allowed}. A launcher sets it, such as torchrun: start through that, or "
        f"unset {name}"
    )


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
