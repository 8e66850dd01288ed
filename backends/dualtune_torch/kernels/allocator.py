"""The allocators of device memory: their limit, how a shortage looks, and how freed memory is kept or returned.

On a CPU, glibc returns large blocks to the system as soon as they are free, and every page of the next block costs a
page fault. A training step allocates tensors of the same sizes again and again, so it pays to keep the blocks. Loading
does not: what a matrix needed while it was cast or quantized would stay in the process beside the model. Nor does it
pay for large matrices of a packed base, unpacked one at a time: an activation takes the beginning of the block that one
has left, the next one does not fit there any more, and in the end the process has room for all of them.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT, LARGEST_KEPT_PACKED = 1 << 30, 1 << 21  # bytes; of a plain base, and of a large packed one
LARGE = 140_000_000  # weights: the room for all of them unpacked matters more than the time of page faults
SMALLEST_RETURNED = 1 << 17  # glibc's default, which glibc raises by itself unless it is set…
LARGEST_RAISED = 1 << 25  # …up to this, and its threshold for the end of the heap to twice as much
HAS_FABRIC = (9, 0)  # compute capability
# In the messages of errors that have no class of their own: from torch's allocator on a CPU, C++, Python, CUDA (and its
# driver, which growing segments ask directly), Triton's launcher, cuBLAS, and cuDNN, whose release 9 has two names.
SHORTAGES = (
    "DefaultCPUAllocator: ", "std::bad_alloc", "can't start new thread",
    "CUDA out of memory", "CUDA error: out of memory", "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory", "_STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED",
)  # fmt: skip
# oneDNN's, whole: what it cannot compute at all lacks a "primitive descriptor".
PRODUCT_SHORTAGE = "could not create a primitive"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch, NumPy or the system raised the error because memory could not be allocated."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    return any(text in str(error) for text in SHORTAGES) or str(error).rstrip().endswith(PRODUCT_SHORTAGE)


def limit_memory(limit_bytes: int | None, device: torch.device) -> None:
    """Enforce `memory.limit`: an allocation beyond it on a GPU fails, or on Linux one beyond it in this process.

    None lifts an earlier limit. On a CPU it counts private memory (RLIMIT_DATA): memory-mapped weights are not in it.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
        torch.cuda.set_per_process_memory_fraction(share)  # of the current GPU, which is ours; refuses a bare "cuda"
    elif sys.platform == "linux":
        import resource

        torch.ones(1 << 20).add_(1)  # starts the threads: where their stacks do not fit, OpenMP ends the process
        soft, hard = _limits_at_first()
        limit = soft if limit_bytes is None else limit_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


@cache
def _limits_at_first() -> tuple[int, int]:
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)


def grow_segments() -> None:
    """Let CUDA's caching allocator enlarge a segment where it would reserve another one.

    Micro-batches of many sizes leave gaps in fixed segments. Nothing changes if the user has set the allocator, or on a
    GPU before Hopper: torch 2.13 asks NVML for the fabric of the GPU then, and ends if the driver does not know it.
    """
    by_user = not os.environ.keys().isdisjoint(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if by_user or sys.platform != "linux" or torch.cuda.get_device_capability() < HAS_FABRIC:
        return
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # older torch has another name
    (configure or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def free_memory() -> None:
    """Return the memory that nothing uses to the system."""
    gc.collect()  # a traceback may be part of a cycle
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    _trim()


def keep_memory(largest: int = LARGEST_KEPT) -> None:
    """Ask glibc to keep freed blocks of up to `largest` bytes. Does nothing with another C library."""
    _set({M_MMAP_THRESHOLD: largest, M_TRIM_THRESHOLD: LARGEST_KEPT})


def return_memory() -> None:
    """Ask glibc to return large blocks as soon as they are free, where memory matters more than time."""
    _set({M_MMAP_THRESHOLD: SMALLEST_RETURNED})


@contextmanager
def memory_returned() -> Iterator[None]:
    """Context in which freed memory is returned at once, and at its end also that of small blocks."""
    return_memory()
    try:
        yield
    finally:
        _set({M_MMAP_THRESHOLD: LARGEST_RAISED, M_TRIM_THRESHOLD: 2 * LARGEST_RAISED})
        _trim()


def _set(options: dict[int, int]) -> None:
    if (mallopt := _function("mallopt")) is not None:
        for option, value in options.items():
            mallopt(option, value)


def _trim() -> None:
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


def _function(name: str) -> Callable[..., int] | None:
    """Return a function of glibc; None with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
