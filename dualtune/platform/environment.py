"""What a kind of machine needs before it can train, held against what is here: the rows of `dualtune check-env`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualtune.checks import Check
from dualtune.config import Config
from dualtune.config.schema import RunConfig
from dualtune.platform.machine import GB, GIB, Machine
from dualtune.platform.places import (
    data_checks,
    directory_checks,
    disk_checks,
    key_checks,
    local_model,
    model_checks,
)
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
LEAST_MACOS = "14.0"  # of the wheels of MLX: https://ml-explore.github.io/mlx/build/html/install.html
LEAST_CUDA = "12.1"
LEAST_CAPABILITY, BFLOAT16_CAPABILITY = "7.0", "8.0"  # Volta, Ampere
RAGGED_TORCH = "2.12"  # torch.nn.attention.varlen with grouped heads, which the torch backend calls
# CUDA 13 has no code for GPUs before Turing, and what came before 12.8 has none for Blackwell. Of torch's wheels, PyPI
# has those for CUDA 13; the older ones are for 12.6: https://github.com/pytorch/pytorch/issues/178665
CUDA13_CAPABILITY, BLACKWELL_CAPABILITY, BLACKWELL_CUDA = "7.5", "10.0", "12.8"
DEFAULT_WHEELS = "pip install --force-reinstall torch"
OLDER_WHEELS = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
NEW_DRIVER = "Install NVIDIA's driver 580 or newer (CUDA 13): https://www.nvidia.com/drivers"


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
    return rows + place_checks(target, config, os.environ)


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
    gpu, cuda = machine.gpus[0], machine.cuda or "0"
    torch = machine.packages.get("torch")
    return [
        Check("GPU", "ok", f"{gpu.name}, driver {machine.driver}"),
        _driver_check(cuda),
        _build_check(torch, machine.torch_cuda, cuda, gpu.compute_capability),
        _capability_check(gpu.compute_capability),
        _memory("GPU memory", gpu.total_bytes / GB, "GB", target),
        _attention_check(gpu.compute_capability, torch),
    ]


def _driver_check(cuda: str) -> Check:
    if at_least(cuda, LEAST_CUDA):
        return Check("CUDA of the driver", "ok", cuda)
    return Check("CUDA of the driver", "fail", f"got {cuda}, {LEAST_CUDA} or newer is needed", NEW_DRIVER)


def _build_check(torch: str | None, built: str | None, cuda: str, capability: str) -> Check:
    """Whether the driver can run what torch was built with, and whether that has code for the GPU."""
    name = "CUDA of torch"
    again = OLDER_WHEELS if _needs_older(cuda, capability) else DEFAULT_WHEELS
    if torch is None or built is None:
        return Check(name, "skipped", "torch is not installed" if torch is None else f"torch {torch} does not tell")
    if built == "none":
        return Check(name, "fail", f"torch {torch} was built without CUDA: it sees no NVIDIA GPU", again)
    if not at_least(cuda, built.partition(".")[0]):  # within a major version, older drivers do
        text = f"torch was built for {built}, the driver knows {cuda} and older"
        return Check(name, "fail", text, f"{NEW_DRIVER}. Or: {OLDER_WHEELS}")
    too_old = at_least(built, "13") and not at_least(capability, CUDA13_CAPABILITY)
    too_new = at_least(capability, BLACKWELL_CAPABILITY) and not at_least(built, BLACKWELL_CUDA)
    if too_old or too_new:
        return Check(
            name, "fail", f"torch was built for {built}, without code for compute capability {capability}", again
        )
    return Check(name, "ok", f"{built}, which the driver's {cuda} runs")


def _needs_older(cuda: str, capability: str) -> bool:
    """Whether torch's default build, for CUDA 13, would not run here."""
    return not (at_least(cuda, "13") and at_least(capability, CUDA13_CAPABILITY))


def _capability_check(found: str) -> Check:
    name = "compute capability"
    if not at_least(found, LEAST_CAPABILITY):
        text = f"got {found}, {LEAST_CAPABILITY} or newer is needed"
        return Check(name, "fail", text, "Train on a newer GPU, or with --platform cpu")
    if not at_least(found, BFLOAT16_CAPABILITY):
        text = f"{found}: no bfloat16 below {BFLOAT16_CAPABILITY}, so model.dtype auto takes float16"
        return Check(name, "advice", text)
    return Check(name, "ok", found)


def _attention_check(capability: str, torch: str | None) -> Check:
    """FlashAttention is torch's own; the package flash-attn is never used."""
    name = "flash attention"
    without = (
        "Without it, rows get a mask that is written out: the same losses, but long rows take more time and memory"
    )
    if not at_least(capability, BFLOAT16_CAPABILITY):
        return Check(name, "advice", f"optional; needs compute capability {BFLOAT16_CAPABILITY}. {without}")
    if torch is None or not at_least(torch, RAGGED_TORCH):
        upgrade = f"pip install --upgrade 'torch>={RAGGED_TORCH}'"
        return Check(name, "advice", f"optional; comes with torch {RAGGED_TORCH}. {without}", upgrade)
    return Check(name, "ok", "torch's own; the package flash-attn is not needed and not used")


def metal_checks(machine: Machine, target: Target) -> list[Check]:
    """Chip, system and unified memory."""
    if machine.surroundings.rosetta:
        text = "this Python was built for Intel and is translated by Rosetta; MLX needs one for arm64"
        return [Check("Apple silicon", "fail", text, "rm -rf .venv && ./setup_m4.sh, from a native terminal")]
    if not machine.is_apple_silicon:
        text = f"this is {machine.system} on {machine.arch}; MLX is fast on Apple silicon alone"
        return [Check("Apple silicon", "fail", text, "dualtune check-env --for auto")]
    system = Check("macOS", "ok" if machine.macos else "skipped", machine.macos or "its version was not found")
    if machine.macos and not at_least(machine.macos, LEAST_MACOS):
        text = f"got {machine.macos}, MLX needs {LEAST_MACOS} or newer"
        system = Check("macOS", "fail", text, "System Settings > General > Software Update")
    memory = _memory("unified memory", machine.memory_bytes / GIB, "GiB", target)
    return [Check("Apple silicon", "ok", machine.cpu), system, memory]


def _memory(name: str, found: float, unit: str, target: Target) -> Check:
    text = f"{found:.0f} {unit}, {target.good_memory} or more wanted"
    if found >= target.good_memory:
        return Check(name, "ok", text)
    if found >= target.least_memory:
        return Check(name, "advice", text, target.smaller)
    return Check(name, "fail", f"{found:.0f} {unit}, at least {target.least_memory} is needed", target.smaller)


# --- places -----------------------------------------------------------------------------------------------------------


def place_checks(target: Target, config: Config | None, environ: Mapping[str, str]) -> list[Check]:
    """Disk, directories, data, model and keys."""
    run_dir = Path((config.run if config else RunConfig()).dir).expanduser()
    download = config is None or local_model(config.model.name) is None
    rows = [*disk_checks(run_dir, target.download_gb if download else 0), *directory_checks(run_dir)]
    if config is None:
        rows.append(Check("data and model", "skipped", "no config was given: --config CONFIG looks for both"))
    else:
        rows += [*data_checks(config), *model_checks(config)]
    return rows + key_checks(environ, download=config is not None and download)
