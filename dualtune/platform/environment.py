"""What a kind of machine needs before it can train, held against what is here: the rows of `dualtune check-env`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dualtune.checks import Check
from dualtune.config import Config
from dualtune.config.schema import RunConfig
from dualtune.platform.machine import GB, GIB, Gpu, Machine
from dualtune.platform.places import (
    data_checks,
    directory_checks,
    disk_checks,
    hub_token,
    local_model,
    model_checks,
)
from dualtune.platform.problems import problems
from dualtune.platform.requirements import at_least, least_python, package_checks, requirements
from dualtune.versions import versions_of


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of machine, and what its configs ask of one."""

    device: str  # "cuda", "metal" or "cpu"
    extra: str  # what to install of dualtune
    least_memory: int  # GB of GPU memory; GiB of unified memory; GiB of memory
    good_memory: int  # with less, the config for the target has to be made smaller
    download_gb: int  # for the base model, as the hub stores it
    smaller: str  # what to do with too little memory


SMALLER = "take a smaller model; dualtune check-gpu says which fits, and dualtune check-config whether a config does"
TARGETS = {
    "h100": Target("cuda", "torch", 60, 60, 30, "Use --for rtx, and configs/rtx_24gb.yaml"),
    "m4": Target("metal", "mlx", 16, 32, 20, f"Set data.max_length and train.micro_batch_tokens to 1024, or {SMALLER}"),
    "rtx": Target("cuda", "torch", 12, 16, 20, SMALLER.capitalize()),
    "cpu": Target("cpu", "torch", 4, 4, 5, SMALLER.capitalize()),
}
BFLOAT16_CAPABILITY = (8, 0)  # Ampere
RAGGED_TORCH = "2.12"  # torch.nn.attention.varlen with grouped heads, which the torch backend calls


def suited_target(machine: Machine) -> str:
    """The target for `--for auto`: what the hardware is for, whatever Python runs on it."""
    if machine.is_mac_with_apple_silicon:
        return "m4"
    if machine.gpus:
        return "h100" if machine.gpus[0].total_bytes >= TARGETS["h100"].least_memory * GB else "rtx"
    return "cpu"


def check_environment(name: str, machine: Machine, config: Config | None) -> list[Check]:
    """All rows for a target, looked up on this machine. Nothing is downloaded, and no framework imported."""
    target = TARGETS[name]
    asked = requirements(target.extra, machine.system)
    rows = [python_check(machine.python)]
    rows += package_checks(asked, target.extra, versions_of(one.name for one in asked))
    match target.device:
        case "cuda":
            rows += cuda_checks(machine, target)
        case "metal":
            rows += metal_checks(machine, target)
        case _:
            rows.append(_memory("memory", machine.memory_bytes / GIB, "GiB", target))
    return rows + place_checks(target, config)


def python_check(found: str) -> Check:
    needed = least_python()
    if needed.contains(found, prereleases=True):
        return Check("Python", "ok", found)
    return Check(
        "Python", "fail", f"got {found}, Python {needed} is needed", "python3.12 -m venv .venv, and install anew"
    )


# --- the accelerator --------------------------------------------------------------------------------------------------


def cuda_checks(machine: Machine, target: Target) -> list[Check]:
    """Driver, torch's build, and the first GPU that is visible."""
    if not machine.gpus:
        reason = machine.gpu_problem or "no NVIDIA GPU is visible"
        return [Check("GPU", "fail", reason, "dualtune check-gpu says what to do about it")]
    gpu, torch = machine.gpus[0], machine.packages.get("torch")
    return [
        Check("GPU", "ok", f"{gpu.name}, driver {machine.driver}"),
        _unless(machine, "driver", Check("CUDA of the driver", "ok", str(machine.cuda))),
        _build_check(machine, torch),
        _unless(machine, "compute capability", _capability_check(gpu)),
        _memory("GPU memory", gpu.total_bytes / GB, "GB", target),
        _attention_check(gpu, torch),
    ]


def _unless(machine: Machine, problem: str, fine: Check) -> Check:
    """The row, or the machine's problem of that name, in the words of check-gpu and with what mends it."""
    found = next((row for row in problems(machine) if row.name == problem), None)
    return replace(found, name=fine.name) if found else fine


def _build_check(machine: Machine, torch: str | None) -> Check:
    """Whether the driver can run what torch was built with, and whether that has code for the GPU."""
    name, built = "CUDA of torch", machine.torch_cuda
    if torch is None or built is None:
        return Check(name, "skipped", "torch is not installed" if torch is None else f"torch {torch} does not tell")
    return _unless(machine, "torch", Check(name, "ok", f"{built}, which the driver's {machine.cuda} runs"))


def _capability_check(gpu: Gpu) -> Check:
    name, found = "compute capability", gpu.compute_capability
    if gpu.capability < BFLOAT16_CAPABILITY:
        return Check(name, "advice", f"{found}: no bfloat16 below 8.0, so model.dtype auto takes float16")
    return Check(name, "ok", found)


def _attention_check(gpu: Gpu, torch: str | None) -> Check:
    """FlashAttention is torch's own; the package flash-attn is never used."""
    name = "flash attention"
    without = (
        "Without it, rows get a mask that is written out: the same losses, but long rows take more time and memory"
    )
    if gpu.capability < BFLOAT16_CAPABILITY:
        return Check(name, "advice", f"optional; needs compute capability 8.0. {without}")
    if torch is None or not at_least(torch, RAGGED_TORCH):
        upgrade = f"pip install --upgrade 'torch>={RAGGED_TORCH}'"
        return Check(name, "advice", f"optional; comes with torch {RAGGED_TORCH}. {without}", upgrade)
    return Check(name, "ok", "torch's own; the package flash-attn is not needed and not used")


def metal_checks(machine: Machine, target: Target) -> list[Check]:
    """Chip, system and unified memory."""
    chip = Check("Apple silicon", "ok", machine.cpu)
    if not machine.is_apple_silicon:
        text = f"this is {machine.system} on {machine.arch}; MLX is fast on Apple silicon alone"
        chip = Check("Apple silicon", "fail", text, "dualtune check-env --for auto")
    chip = _unless(machine, "Python", chip)  # which runs under Rosetta
    if chip.level == "fail":
        return [chip]
    system = Check("macOS", "ok" if machine.macos else "skipped", machine.macos or "its version was not found")
    memory = _memory("unified memory", machine.memory_bytes / GIB, "GiB", target)
    return [chip, _unless(machine, "macOS", system), memory]


def _memory(name: str, found: float, unit: str, target: Target) -> Check:
    text = f"{found:.0f} {unit}, {target.good_memory} or more wanted"
    if found >= target.good_memory:
        return Check(name, "ok", text)
    if found >= target.least_memory:
        return Check(name, "advice", text, target.smaller)
    return Check(name, "fail", f"{found:.0f} {unit}, at least {target.least_memory} is needed", target.smaller)


# --- places -----------------------------------------------------------------------------------------------------------


def place_checks(target: Target, config: Config | None) -> list[Check]:
    """Disk, directories, data, model and the token for the hub."""
    run_dir = Path((config.run if config else RunConfig()).dir).expanduser()
    download = config is None or local_model(config.model.name) is None
    rows = [*disk_checks(run_dir, target.download_gb if download else 0), *directory_checks(run_dir)]
    if config is None:
        rows.append(Check("data and model", "skipped", "no config was given: --config CONFIG looks for both"))
    else:
        rows += [*data_checks(config), *model_checks(config)]
    return [*rows, hub_token(download=config is not None and download)]
