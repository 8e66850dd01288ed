"""Find GPUs, Apple silicon and CPU by asking the driver and the system, not a deep-learning framework."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from dualtune.versions import versions_of


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str  # "9.0"


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. `gpu_problem` says why no NVIDIA GPU was, in the driver's words."""

    system: str
    arch: str
    python: str
    cpu: str
    cores: int
    memory_bytes: int
    available_bytes: int
    gpus: list[Gpu] = field(default_factory=lambda: [])
    driver: str | None = None
    cuda: str | None = None  # the newest CUDA that the driver supports
    gpu_problem: str | None = None
    packages: dict[str, str] = field(default_factory=lambda: {})

    @property
    def is_apple_silicon(self) -> bool:
        return self.system == "Darwin" and self.arch == "arm64"


PACKAGES = ("torch", "bitsandbytes", "transformers", "peft", "mlx", "mlx-lm")


def detect() -> Machine:
    """Look at this machine. Never raises: what cannot be found out is reported as such."""
    memory = psutil.virtual_memory()
    gpus, driver, cuda, problem = _nvidia()
    return Machine(
        system=platform.system(),
        arch=platform.machine(),
        python=platform.python_version(),
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        gpus=gpus,
        driver=driver,
        cuda=cuda,
        gpu_problem=problem,
        packages=versions_of(PACKAGES),
    )


def is_installed(framework: str) -> bool:
    """Whether "torch" or "mlx" can be found; nothing is imported."""
    return find_spec(framework) is not None


def _nvidia() -> tuple[list[Gpu], str | None, str | None, str | None]:
    """(GPUs, driver version, CUDA version, problem) by NVML."""
    pynvml: Any = import_module("pynvml")  # of the distribution nvidia-ml-py
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], None, None, str(error)
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = [_gpu(pynvml, i) for i in _visible(pynvml.nvmlDeviceGetCount())]
        return gpus, pynvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}", None
    except pynvml.NVMLError as error:
        return [], None, None, str(error)
    finally:
        pynvml.nvmlShutdown()


def _visible(count: int) -> list[int]:
    """The indices that CUDA_VISIBLE_DEVICES leaves; UUIDs in it are not resolved, and all GPUs are listed."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or wanted.strip().startswith(("GPU-", "MIG-")):
        return list(range(count))
    # CUDA stops at the first entry that is no GPU.
    parts = takewhile(lambda part: part.strip().isdigit() and int(part) < count, wanted.split(","))
    return [int(part) for part in parts]


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(pynvml.nvmlDeviceGetName(handle), memory.total, memory.free, f"{major}.{minor}")


def _cpu_name() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "Apple"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
