"""What a kind of machine needs before it can train, compared with this machine: the rows of `dualtune check-env`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError
from dualtune.base.files import expanded
from dualtune.base.versions import versions_of
from dualtune.config import Config
from dualtune.config.schema import RunConfig
from dualtune.doctor.storage import data_checks, directory_checks, disk_checks, hub_token, local_model, model_checks
from dualtune.engine.card import Card, backend_names, card_of, driver_of
from dualtune.engine.machine import GB, GIB, Gpu, Machine
from dualtune.engine.problems import (
    BFLOAT16_CAPABILITY,
    least_python,
    package_checks,
    problems,
    requirements,
    row_or_problem,
)


@dataclass(frozen=True, slots=True)
class TargetMachine:
    """A kind of machine, and what the configs for it require."""

    device: str  # a kind, as in `Machine.kinds`
    least_memory: int  # GB of GPU memory; GiB of unified memory; GiB of memory
    good_memory: int  # with less, the config for the target must be reduced
    download_gb: int  # for the base model, as the hub stores it
    smaller: str  # what to do with too little memory


SMALLER = "use a smaller model; dualtune check-gpu says which fits, and dualtune check-config whether a config does"
TARGETS = {
    "h100": TargetMachine("cuda", 60, 60, 30, "Use --for rtx, and configs/rtx_24gb.yaml"),
    "m4": TargetMachine("metal", 16, 32, 20, f"Set data.max_length and train.micro_batch_tokens to 1024, or {SMALLER}"),
    "rtx": TargetMachine("cuda", 12, 16, 20, SMALLER.capitalize()),
    "cpu": TargetMachine("cpu", 4, 4, 5, SMALLER.capitalize()),
}


def suited_target(machine: Machine) -> str:
    """Return the target for `--for auto`: that of the hardware, with any Python."""
    if machine.is_mac_with_apple_silicon:
        return "m4"
    if machine.gpus:
        return "h100" if machine.gpus[0].total_bytes >= TARGETS["h100"].least_memory * GB else "rtx"
    return "cpu"


def target_of(name: str, machine: Machine) -> tuple[TargetMachine, Card]:
    """Return a target and its backend, by the name of either. For a backend, the best of its devices here counts."""
    if name in TARGETS:
        return TARGETS[name], driver_of(TARGETS[name].device)
    if name not in backend_names():
        raise ConfigError(f"--for: got '{name}', allowed: {', '.join(('auto', *TARGETS, *backend_names()))}")
    card = card_of(name)
    return replace(TARGETS["cpu"], device=card.kind_for(name, machine.kinds) or "cpu"), card


def check_environment(name: str, machine: Machine, config: Config | None) -> list[Check]:
    """Return all rows for a target on this machine. Nothing is downloaded, and no framework imported.

    `name`: of a target or a backend. ConfigError for any other.
    """
    target, card = target_of(name, machine)
    required = requirements(card.package, machine.system)
    rows = [python_check(machine.python)]
    rows += package_checks(required, card.package.command, versions_of(one.name for one in required))
    match target.device:
        case "cuda":
            rows += cuda_checks(machine, target, card)
        case "metal":
            rows += metal_checks(machine, target, card)
        case _:
            rows.append(_memory("memory", machine.memory_bytes / GIB, "GiB", target))
    return rows + place_checks(target, config)


def python_check(version: str) -> Check:
    needed = least_python()
    if needed.contains(version, prereleases=True):
        return Check("Python", "ok", version)
    return Check(
        "Python", "fail", f"got {version}, Python {needed} is needed", "python3.12 -m venv .venv, and install again"
    )


# --- the accelerator --------------------------------------------------------------------------------------------------


def cuda_checks(machine: Machine, target: TargetMachine, card: Card) -> list[Check]:
    """Check the driver, the first visible GPU, and what the backend adds."""
    if not machine.gpus:
        reason = machine.gpu_problem or "no NVIDIA GPU is visible"
        return [Check("GPU", "fail", reason, "dualtune check-gpu says what to do")]
    gpu, machine_problems = machine.gpus[0], problems(machine)
    return [
        Check("GPU", "ok", f"{gpu.name}, driver {machine.driver}"),
        row_or_problem(Check("CUDA of the driver", "ok", str(machine.cuda)), "driver", machine_problems),
        row_or_problem(_capability_check(gpu), "compute capability", machine_problems),
        _memory("GPU memory", gpu.total_bytes / GB, "GB", target),
        *(card.environment(machine) if card.environment else ()),
    ]


def _capability_check(gpu: Gpu) -> Check:
    name, capability = "compute capability", gpu.compute_capability
    if gpu.capability < BFLOAT16_CAPABILITY:
        return Check(name, "advice", f"{capability}: no bfloat16 below 8.0, so model.dtype auto takes float16")
    return Check(name, "ok", capability)


def metal_checks(machine: Machine, target: TargetMachine, card: Card) -> list[Check]:
    """Check the chip, what the backend adds, and the unified memory."""
    chip = Check("Apple silicon", "ok", machine.cpu)
    if not machine.is_apple_silicon:
        text = f"this is {machine.system} on {machine.arch}; {card} is fast only on Apple silicon"
        chip = Check("Apple silicon", "fail", text, "dualtune check-env --for auto")
    chip = row_or_problem(chip, "Python", problems(machine))  # if it runs under Rosetta
    if chip.level == "fail":
        return [chip]
    memory = _memory("unified memory", machine.memory_bytes / GIB, "GiB", target)
    return [chip, *(card.environment(machine) if card.environment else ()), memory]


def _memory(name: str, size: float, unit: str, target: TargetMachine) -> Check:
    text = f"{size:.0f} {unit}, {target.good_memory} or more recommended"
    if size >= target.good_memory:
        return Check(name, "ok", text)
    if size >= target.least_memory:
        return Check(name, "advice", text, target.smaller)
    return Check(name, "fail", f"{size:.0f} {unit}, at least {target.least_memory} is needed", target.smaller)


# --- directories ------------------------------------------------------------------------------------------------------


def place_checks(target: TargetMachine, config: Config | None) -> list[Check]:
    """Check disk, directories, data, model and the hub token."""
    run_dir = expanded((config.run if config else RunConfig()).dir)
    download = config is None or local_model(config.model.name) is None
    rows = [*disk_checks(run_dir, target.download_gb if download else 0), *directory_checks(run_dir)]
    if config is None:
        rows.append(Check("data and model", "skipped", "no config was given; --config CONFIG checks both"))
    else:
        rows += [*data_checks(config), *model_checks(config)]
    return [*rows, hub_token(download=config is not None and download)]
