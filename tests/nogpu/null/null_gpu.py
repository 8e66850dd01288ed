"""What the null GPU in this process was asked to do."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

SYMBOL = "null_gpu_counts"


def is_loaded() -> bool:
    """Return whether this process has the null GPU."""
    return hasattr(ctypes.CDLL(None), SYMBOL)


@dataclass
class Counts:
    """How often each thing was done, by its kind ("launch", "copy", "wait"…) and what it is; and the bytes."""

    times: dict[str, Counter[str]] = field(default_factory=dict)
    amounts: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> dict[str, int]:
        return dict(self.times.get(kind, {}))

    def total(self, kind: str) -> int:
        return sum(self[kind].values())


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what happens inside; the result is complete after the block."""
    found = Counts()
    _library().null_gpu_reset()
    yield found
    for line in _library().null_gpu_counts().decode().splitlines():
        kind, what, times, amount = line.split("\t")
        found.times.setdefault(kind, Counter())[what] += int(times)
        found.amounts[kind] = found.amounts.get(kind, 0) + float(amount)


def set_memory(size: int, device: int = 0) -> None:
    """Give a device this many bytes of memory, whatever is in use."""
    _library().null_gpu_set_memory(device, size)


def set_failing(value: bool) -> None:
    """Let every launch, copy and wait fail from now on, as after a fault of the device; or end that."""
    _library().null_gpu_set_failing(value)


def used_memory(device: int = 0) -> int:
    """Return the bytes that are allocated on a device."""
    return _library().null_gpu_used_memory(device)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.null_gpu_counts.restype = ctypes.c_char_p
    library.null_gpu_set_memory.argtypes = (ctypes.c_int, ctypes.c_size_t)
    library.null_gpu_used_memory.restype = ctypes.c_size_t
    return library
