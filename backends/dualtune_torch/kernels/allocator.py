"""How the C library keeps freed memory on a CPU.

glibc returns large blocks to the system as soon as they are free, and every page of the next block costs a page fault.
A training step allocates tensors of the same sizes again and again, so it pays to keep the blocks.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 1 << 30  # bytes
SMALLEST_RETURNED = 1 << 17  # glibc's default, which glibc raises by itself unless it is set


@cache
def keep_memory() -> None:
    """Ask glibc to keep freed blocks. Does nothing with another C library."""
    _set({M_MMAP_THRESHOLD: LARGEST_KEPT, M_TRIM_THRESHOLD: LARGEST_KEPT})


@cache
def return_memory() -> None:
    """Ask glibc to return large blocks as soon as they are free, where memory matters more than time."""
    _set({M_MMAP_THRESHOLD: SMALLEST_RETURNED})


def _set(options: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
