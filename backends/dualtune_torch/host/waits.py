"""Where the host waits for a GPU, as torch's synchronization debug mode reports it."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

MESSAGE = "called a synchronizing CUDA operation"  # of the warning, in c10/cuda/CUDAFunctions.cpp


@contextmanager
def counted_waits() -> Generator[list[str]]:
    """Yield a list that has, after the block, the file and line of each call in it that waited for the GPU.

    https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
    """
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
            waits = [each for each in caught if MESSAGE in str(each.message)]
            places += [f"{Path(each.filename).name}:{each.lineno}" for each in waits]
