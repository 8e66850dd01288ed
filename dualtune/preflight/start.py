"""The example config to start with on a machine, and the settings with which it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dualtune.config.examples import example_path
from dualtune.memory.plan import Smaller
from dualtune.platform.machine import GB, GIB, Machine
from dualtune.preflight.question import about_config
from dualtune.preflight.recommend import LEAST_LENGTH, Largest, qlora
from dualtune.preflight.thresholds import CPU_CONFIG, CUDA_CONFIGS, MAC_CONFIGS, device_of


@dataclass(frozen=True, slots=True)
class Start:
    """A file in configs/ that fits a machine, possibly with other settings."""

    config: str
    need_bytes: int | None = None  # without other settings; None: it fits any machine
    smaller: Smaller | None = None


def start_of(machine: Machine, largest: Largest | None) -> Start | None:
    """Return the fitting config made for the largest machine up to this one; None if none fits.

    A config may fit with smaller micro-batches, or with documents that are shorter, but not too short; the last config
    may also fit with the largest model that fits.
    """
    configs = _configs(machine)
    if configs == (CPU_CONFIG,):
        return Start(CPU_CONFIG)
    questions = {name: about_config(machine, example_path(name)) for name in configs}
    starts = [Start(name, question.need_bytes, question.smaller) for name, question in questions.items()]
    found = next((start for start in starts if start.smaller is None or _is_worth_it(start.smaller)), None)
    if found is not None or largest is None:
        return found
    length = largest.max_length
    settings = {"model.name": largest.name, "model.quantization": qlora(device_of(machine)).quantization}
    lengths = {"data.max_length": length, "train.micro_batch_tokens": length}
    return replace(starts[-1], smaller=Smaller(settings | lengths, "fits"))


def _configs(machine: Machine) -> tuple[str, ...]:
    """Return the example configs for machines up to this one, largest first."""
    match device_of(machine):
        case "cuda":
            memory = machine.gpus[0].total_bytes / GB
            return tuple(name for least, name in CUDA_CONFIGS if memory >= least)
        case "metal":
            memory = machine.memory_bytes / GIB
            return tuple(name for least, name in MAC_CONFIGS if memory >= least)
        case "cpu":
            return (CPU_CONFIG,)


def _is_worth_it(smaller: Smaller) -> bool:
    return bool(smaller.settings) and int(smaller.settings.get("data.max_length", LEAST_LENGTH)) >= LEAST_LENGTH
