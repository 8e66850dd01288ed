"""`memory.limit`: an allocation beyond it fails, instead of taking the memory of other programs."""

from __future__ import annotations

import sys
from functools import cache

import torch


def limit_memory(limit_bytes: int | None, device: torch.device) -> None:
    """Limit the memory of a GPU that this process may allocate, or on Linux that of the process itself.

    None lifts an earlier limit. On a CPU it counts private memory (RLIMIT_DATA): memory-mapped weights are not in it.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
        torch.cuda.set_per_process_memory_fraction(share, device)
    elif sys.platform == "linux":
        import resource

        soft, hard = _limits_at_first()
        wanted = soft if limit_bytes is None else limit_bytes
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


@cache
def _limits_at_first() -> tuple[int, int]:
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)
