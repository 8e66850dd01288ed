"""How many bytes a run may use on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from dualtune.engine.machine import GIB, Machine

# The memory of an idle GPU that a run does not get: for the driver, a screen, error correction. NVML reports 0.3 to
# 0.6 GB less free than total on an idle card.
GPU_RESERVE_BYTES = GIB // 2


@dataclass(frozen=True, slots=True)
class Budget:
    """A number of bytes, and a sentence that says where it comes from."""

    bytes: int
    reason: str
    host_bytes: int | None = None  # of the memory beside a device that has its own


def within(found: Budget, limit_bytes: int | None) -> Budget:
    """Return the memory for a run with `memory.limit`."""
    if limit_bytes is None or found.bytes <= limit_bytes:
        return found
    return Budget(limit_bytes, "memory.limit", found.host_bytes)


def budget(machine: Machine, device: str = "auto") -> Budget:
    """Return the memory for a run on "cuda", "cuda:1", "metal", "cpu", or with "auto" on the best kind of device.

    0 bytes if the machine has no such device; the reason says so.
    """
    if device == "auto":
        device = machine.kind
    if device.startswith("cuda"):
        return _of_gpu(machine, int(device.partition(":")[2] or 0))
    if device == "metal" and machine.metal_limit_bytes is not None:
        share = f"{machine.metal_limit_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.0f} GiB of unified memory"
        return Budget(machine.metal_limit_bytes, f"Metal's working set, {share} ({machine.metal_limit_source})")
    limit = " of the control group" if machine.memory_limit_bytes is not None else ""
    memory = f"{machine.available_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB of memory"
    return Budget(machine.available_bytes, f"{memory}{limit} available")


def _of_gpu(machine: Machine, index: int) -> Budget:
    if index >= len(machine.gpus):
        count = len(machine.gpus)
        problem = "no NVIDIA GPU is visible" if not count else f"there is no GPU {index}, only {count} visible"
        return Budget(0, problem)
    gpu = machine.gpus[index]
    usable = gpu.total_bytes - GPU_RESERVE_BYTES
    total, host = f"{gpu.total_bytes / GIB:.1f} GiB", machine.available_bytes
    if gpu.free_bytes < usable:
        return Budget(gpu.free_bytes, f"{gpu.free_bytes / GIB:.1f} of {total} free on {gpu.name}", host)
    return Budget(usable, f"{total} on {gpu.name}, less {GPU_RESERVE_BYTES / GIB:.1f} GiB for driver and screen", host)
