"""The figures that machines are judged by, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dualtune.checks import Level
from dualtune.platform.machine import GB, GIB, Machine


@dataclass(frozen=True, slots=True)
class Class:
    """What so much memory is called. It is judged for QLoRA of the 7B class, in long documents."""

    least: float  # GB (10^9) of GPU memory, as cards are sold; GiB of unified memory, as Macs are
    label: str
    level: Level
    meaning: str


# Best first. NVML reports up to 4 % less than the label: "from 70" means cards of 80 GB.
CUDA_CLASSES = (
    Class(70, "H100 class", "ok", "of the H100 class"),
    Class(24, "adequate", "ok", "adequate for models of 7B in long documents"),
    Class(20, "low", "advice", "low for models of 7B in long documents, for which 24 GB are adequate"),
    Class(0, "too small", "fail", "too small for models of 7B in long documents, which want 20 GB or more"),
)
MAC_CLASSES = (
    Class(32, "good", "ok", "good for models of 7B in long documents"),
    Class(16, "limited", "advice", "limited for models of 7B in long documents, for which 32 GiB are good"),
    Class(0, "too small", "fail", "too small for models of 7B in long documents, which want 16 GiB or more"),
)
NO_ACCELERATOR = Class(0, "no accelerator", "fail", "no machine for models of 7B")

# GB of GPU memory -> the example config that was made for such cards.
CUDA_CONFIGS = ((40, "training_config_h100.yaml"), (20, "rtx_24gb.yaml"), (0, "rtx_16gb.yaml"))
MAC_CONFIG, CPU_CONFIG = "training_config_m4.yaml", "cpu_smoke.yaml"

LEAST_CAPABILITY = (7, 0)  # Volta, the first with tensor cores
LEAST_CUDA = (12, 1)  # of the driver
LEAST_MACOS = (14,)  # of MLX: ml-explore.github.io/mlx/build/html/install.html
# CUDA 13 has no code for GPUs older than Turing, and what came before 12.8 none for Blackwell: the support matrix in
# pytorch's RELEASE.md.
CUDA_13_CAPABILITY = (7, 5)
BLACKWELL_CAPABILITY, BLACKWELL_CUDA = (10, 0), (12, 8)


def version(text: str) -> tuple[int, ...]:
    """Numbers to compare: "13.0" is newer than "12.1", and "14" than "9"."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def device_of(machine: Machine) -> Literal["cuda", "mlx", "cpu"]:
    """What a run would take: the CPU where the GPU is too old to be used."""
    if machine.platform == "cuda" and machine.gpus[0].capability < LEAST_CAPABILITY:
        return "cpu"
    return machine.platform


def class_of(machine: Machine) -> Class:
    """By the first visible GPU, or by the unified memory."""
    match machine.platform:
        case "cuda":
            return _first(machine.gpus[0].total_bytes / GB, CUDA_CLASSES)
        case "mlx":
            return _first(machine.memory_bytes / GIB, MAC_CLASSES)
        case "cpu":
            return NO_ACCELERATOR


def _first(memory: float, classes: tuple[Class, ...]) -> Class:
    return next(one for one in classes if memory >= one.least)
