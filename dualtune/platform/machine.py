"""What is known of a machine: its system, processor, memory, GPUs, and what stands in the way of using them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GB, GIB = 10**9, 2**30  # GPUs are sold in GB; unified and host memory in GiB

Kind = Literal["cuda", "metal", "cpu"]  # of devices: NVIDIA GPUs, Apple's GPUs, processors
# Why the NVIDIA driver did not answer, as far as NVML tells.
Fault = Literal["no binding", "no library", "not loaded", "mismatch", "no permission", "other"]


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A program that holds memory of a GPU."""

    pid: int
    name: str  # "?" where the system does not tell
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
        """For comparisons: "10.0" is newer than "9.0"."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a driver that does not answer is to be explained by."""

    wsl: bool = False
    wsl_driver: bool = False  # Windows' driver is in /usr/lib/wsl/lib
    container: bool = False
    nvidia_card: bool = False  # on the PCI bus
    nvidia_device: bool = False  # /dev/nvidia0
    rosetta: bool = False  # this Python is an Intel one, on Apple silicon


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. `gpu_problem` says why no NVIDIA GPU was, in the driver's words."""

    system: str
    arch: str
    python: str
    cpu: str
    cores: int
    memory_bytes: int  # where a control group allows less than the hardware has, what it allows
    available_bytes: int
    gpus: list[Gpu] = field(default_factory=lambda: [])  # those that CUDA_VISIBLE_DEVICES leaves, in its order
    driver: str | None = None
    cuda: str | None = None  # the newest CUDA that the driver supports
    gpu_problem: str | None = None
    packages: dict[str, str] = field(default_factory=lambda: {})
    hidden_gpus: tuple[Gpu, ...] = ()  # those that CUDA_VISIBLE_DEVICES leaves out, and slices that CUDA does not take
    gpu_fault: Fault | None = None
    mig_without_slice: tuple[str, ...] = ()  # names of GPUs in MIG mode that no slice of is visible
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    cpu_features: tuple[str, ...] = ()  # "AMX", "AVX-512", ...: what decides how fast a matrix product is
    memory_limit_bytes: int | None = None  # of the control group
    macos: str | None = None
    metal_limit_bytes: int | None = None  # how much of the unified memory Metal gives to programs
    metal_limit_source: str = ""
    torch_cuda: str | None = None  # what torch is built for: "13.0", or "none" for a build without CUDA
    surroundings: Surroundings = Surroundings()

    @property
    def is_apple_silicon(self) -> bool:
        """A native Python on Apple silicon."""
        return self.system == "Darwin" and self.arch == "arm64"

    @property
    def is_mac_with_apple_silicon(self) -> bool:
        """The hardware, whatever Python runs on it."""
        return self.is_apple_silicon or self.surroundings.rosetta

    @property
    def kind(self) -> Kind:
        """The kind of device that its hardware is for, whether or not the packages are installed."""
        return "cuda" if self.gpus else "metal" if self.is_mac_with_apple_silicon else "cpu"

    @property
    def kinds(self) -> frozenset[Kind]:
        """All kinds of devices that it has."""
        return frozenset((self.kind, "cpu"))
