"""The facts of a machine: its system, CPU, memory and GPUs, and how many bytes a run may use on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GB, GIB = 10**9, 2**30  # GPUs are sold in GB; unified and host memory in GiB

Kind = Literal["cuda", "metal", "cpu"]  # of devices: NVIDIA GPUs, Apple's GPUs, processors
# Why the NVIDIA driver did not answer, according to NVML.
Fault = Literal["no binding", "no library", "not loaded", "mismatch", "no permission", "other"]


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A program that holds memory of a GPU."""

    pid: int
    name: str  # "?" if unknown
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU, or a MIG slice of one."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str  # "9.0"
    uuid: str = ""
    mig: str | None = None  # the slice's profile, such as "1g.10gb"; None for a whole GPU
    processes: tuple[GpuProcess, ...] = ()

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as numbers to compare: "10.0" is newer than "9.0"."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts that explain why a driver does not answer."""

    wsl: bool = False
    wsl_driver: bool = False  # Windows' driver is in /usr/lib/wsl/lib
    container: bool = False
    nvidia_card: bool = False  # on the PCI bus
    nvidia_device: bool = False  # /dev/nvidia0
    rosetta: bool = False  # this Python is an Intel one, on Apple silicon


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as detected. `gpu_problem`: the driver's message why there is no NVIDIA GPU."""

    system: str
    arch: str
    python: str
    cpu: str
    cores: int
    memory_bytes: int  # of the hardware, or the lower limit of a control group
    available_bytes: int
    gpus: list[Gpu] = field(default_factory=lambda: [])  # those that CUDA_VISIBLE_DEVICES leaves, in its order
    driver: str | None = None
    cuda: str | None = None  # the newest CUDA that the driver supports
    gpu_problem: str | None = None
    packages: dict[str, str] = field(default_factory=lambda: {})
    hidden_gpus: tuple[Gpu, ...] = ()  # those hidden by CUDA_VISIBLE_DEVICES, and slices that CUDA does not use
    gpu_fault: Fault | None = None
    mig_without_slice: tuple[str, ...] = ()  # names of GPUs in MIG mode without a visible slice
    unreadable_gpus: tuple[str, ...] = ()  # GPUs that the driver lists but cannot read, each with its words
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    cpu_features: tuple[str, ...] = ()  # "AMX", "AVX-512", ...: they decide the speed of matrix products
    memory_limit_bytes: int | None = None  # of the control group
    macos: str | None = None
    metal_limit_bytes: int | None = None  # how much of the unified memory Metal gives to programs
    metal_limit_source: str = ""
    torch_cuda: str | None = None  # what torch is built for: "13.0", or "none" for a build without CUDA
    surroundings: Surroundings = Surroundings()

    @property
    def is_apple_silicon(self) -> bool:
        """Whether this is a native Python on Apple silicon."""
        return self.system == "Darwin" and self.arch == "arm64"

    @property
    def is_mac_with_apple_silicon(self) -> bool:
        """Whether the hardware is Apple silicon, with any Python."""
        return self.is_apple_silicon or self.surroundings.rosetta

    @property
    def kind(self) -> Kind:
        """The best kind of device of its hardware, whether or not the packages are installed."""
        return "cuda" if self.gpus else "metal" if self.is_mac_with_apple_silicon else "cpu"

    @property
    def kinds(self) -> frozenset[Kind]:
        """All kinds of devices that it has."""
        return frozenset((self.kind, "cpu"))


# ----------------------------------------------------------------------------------------------------------------------
# How many bytes a run may use on a machine.

# The memory of an idle GPU that a run does not get: for the driver, a screen, error correction. NVML reports 0.3 to
# 0.6 GB less free than total on an idle card.
GPU_RESERVE_BYTES = GIB // 2


@dataclass(frozen=True, slots=True)
class Budget:
    """A number of bytes, and a sentence that says where it comes from."""

    bytes: int
    reason: str
    host_bytes: int | None = None  # of the memory beside a device that has its own


def within(budget: Budget, limit_bytes: int | None) -> Budget:
    """Return the memory for a run with `memory.limit`."""
    if limit_bytes is None or budget.bytes <= limit_bytes:
        return budget
    return Budget(limit_bytes, "memory.limit", budget.host_bytes)


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
