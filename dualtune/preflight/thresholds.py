"""The thresholds by which machines are judged, as data."""

from __future__ import annotations

from dataclasses import dataclass

from dualtune.checks import Level
from dualtune.platform.machine import Kind, Machine


@dataclass(frozen=True, slots=True)
class Class:
    """A class of machines, by the longest document that QLoRA of a 7B model can train on there."""

    least: int  # tokens
    label: str
    level: Level
    meaning: str


SEVEN_B = "mistralai/Mistral-7B-Instruct-v0.3"
# Best first.
CUDA_CLASSES = (
    Class(16384, "H100 class", "ok", "of the H100 class"),
    Class(4096, "adequate", "ok", "adequate for models of 7B"),
    Class(512, "low", "advice", "low on memory for models of 7B"),
    Class(0, "too small", "fail", "too small for models of 7B"),
)
MAC_CLASSES = (
    Class(1536, "good", "ok", "good for models of 7B"),
    Class(512, "limited", "advice", "limited for models of 7B"),
    Class(0, "too small", "fail", "too small for models of 7B"),
)
NO_ACCELERATOR = Class(0, "no accelerator", "fail", "too slow for models of 7B")

# GB of GPU memory -> the example config made for such cards, largest first; the last one is for a small model.
CUDA_CONFIGS = ((40, "training_config_h100.yaml"), (20, "rtx_24gb.yaml"), (10, "rtx_16gb.yaml"), (0, "lora_chat.yaml"))
# GiB of unified memory -> the example config made for such Macs, likewise.
MAC_CONFIGS = ((32, "training_config_m4.yaml"), (16, "training_config_m4_16gb.yaml"), (0, "lora_chat.yaml"))
CPU_CONFIG = "cpu_smoke.yaml"

LEAST_CAPABILITY = (7, 0)  # Volta, the first with tensor cores
LEAST_CUDA = (12, 1)  # of the driver
BFLOAT16_CAPABILITY = (8, 0)  # Ampere
# CUDA 13 has no code for GPUs older than Turing, and versions before 12.8 have none for Blackwell: the support matrix
# in pytorch's RELEASE.md.
CUDA_13_CAPABILITY = (7, 5)
BLACKWELL_CAPABILITY, BLACKWELL_CUDA = (10, 0), (12, 8)


def version(text: str) -> tuple[int, ...]:
    """Return a version as numbers to compare: "13.0" is newer than "12.1", and "14" than "9"."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def device_of(machine: Machine) -> Kind:
    """Return the kind of device that a run would use: the CPU if the GPU is too old."""
    if machine.kind == "cuda" and machine.gpus[0].capability < LEAST_CAPABILITY:
        return "cpu"
    return machine.kind


def class_of(machine: Machine, longest: int) -> Class:
    """Return the class of a machine, by the longest document of SEVEN_B that fits."""
    device = device_of(machine)
    if device == "cpu":
        return NO_ACCELERATOR
    return next(one for one in (CUDA_CLASSES if device == "cuda" else MAC_CLASSES) if longest >= one.least)
