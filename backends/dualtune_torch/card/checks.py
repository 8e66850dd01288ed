"""What can prevent torch from using an NVIDIA GPU, found without importing torch."""

from __future__ import annotations

from dualtune.base.checks import Check
from dualtune.engine.machine import Gpu, Machine
from dualtune.engine.problems import (
    BFLOAT16_CAPABILITY,
    BLACKWELL_CAPABILITY,
    BLACKWELL_CUDA,
    CUDA_13_CAPABILITY,
    LEAST_CAPABILITY,
    NEW_DRIVER,
    KnownProblem,
    at_least,
    found_on,
    row_or_problem,
    version,
)

DEFAULT_TORCH = "pip install --force-reinstall torch"  # on PyPI: for CUDA 13
OLD_TORCH = f"{DEFAULT_TORCH} --index-url https://download.pytorch.org/whl/cu126"
RAGGED_TORCH = "2.12"  # torch.nn.attention.varlen with grouped heads, which `kernels/attention.py` calls


def problems(machine: Machine) -> list[Check]:
    """Return a row for each problem of this machine."""
    return found_on(machine, PROBLEMS)


def environment(machine: Machine) -> list[Check]:
    """Return the rows of `dualtune check-env` for a machine with a GPU."""
    torch = machine.packages.get("torch")
    return [_build_check(machine, torch), _attention_check(machine.gpus[0], torch)]


# --- problems --------------------------------------------------------------------------------------------------------


def _torch_for(machine: Machine) -> str:
    """Return the command that installs a torch for this driver and GPU."""
    capability = machine.gpus[0].capability
    old = version(machine.cuda or "13.0") < (13,) or capability < CUDA_13_CAPABILITY
    return NEW_DRIVER if old and capability >= BLACKWELL_CAPABILITY else OLD_TORCH if old else DEFAULT_TORCH


def _no_torch(machine: Machine) -> str | None:
    return "torch is not installed, and NVIDIA GPUs need it" if machine.gpus and not _torch(machine) else None


def _cpu_torch(machine: Machine) -> str | None:
    if machine.gpus and machine.torch_cuda == "none":
        return f"torch {_torch(machine)} is built without CUDA and sees no GPU"
    return None


def _torch_too_new(machine: Machine) -> str | None:
    """Within one major version, CUDA runs on older drivers: docs.nvidia.com/deploy/cuda-compatibility."""
    built = _built(machine)
    if not built or machine.cuda is None or built[0] <= version(machine.cuda)[0]:
        return None
    return (
        f"torch is built for CUDA {machine.torch_cuda}, but driver {machine.driver} supports {machine.cuda} and older"
    )


def _no_code(machine: Machine) -> str | None:
    built = _built(machine)
    if not built or machine.gpus[0].capability < LEAST_CAPABILITY:
        return None
    capability = machine.gpus[0].capability
    too_old = built >= (13,) and capability < CUDA_13_CAPABILITY
    too_new = built < BLACKWELL_CUDA and capability >= BLACKWELL_CAPABILITY
    if not (too_old or too_new):
        return None
    gpu = f"compute capability {machine.gpus[0].compute_capability}"
    return f"torch is built for CUDA {machine.torch_cuda}, which has no code for {gpu}"


def _torch(machine: Machine) -> str | None:
    return machine.packages.get("torch")


def _built(machine: Machine) -> tuple[int, ...]:
    """Return the CUDA version that torch is built for, if there is a GPU."""
    known = machine.gpus and machine.torch_cuda not in (None, "none")
    return version(machine.torch_cuda or "") if known else ()


PROBLEMS = (
    KnownProblem("torch", "fail", _no_torch, "pip install 'dualtune[torch]'"),
    KnownProblem("torch", "fail", _cpu_torch, _torch_for),
    KnownProblem("torch", "fail", _torch_too_new, lambda machine: f"{NEW_DRIVER}. Or: {_torch_for(machine)}"),
    KnownProblem("torch", "fail", _no_code, _torch_for),
)

# --- rows of check-env -----------------------------------------------------------------------------------------------


def _build_check(machine: Machine, torch: str | None) -> Check:
    """Check that the driver supports torch's CUDA version, and that torch has code for the GPU."""
    name, built = "CUDA of torch", machine.torch_cuda
    if torch is None or built is None:
        return Check(
            name, "skipped", "torch is not installed" if torch is None else f"torch {torch} does not report it"
        )
    fine = Check(name, "ok", f"{built}, supported by the driver's {machine.cuda}")
    return row_or_problem(fine, "torch", problems(machine))


def _attention_check(gpu: Gpu, torch: str | None) -> Check:
    """FlashAttention is torch's own; the package flash-attn is never used."""
    name = "flash attention"
    without = "Without it, attention uses a dense mask: the same losses, but long rows need more time and memory"
    if gpu.capability < BFLOAT16_CAPABILITY:
        return Check(name, "advice", f"optional; needs compute capability 8.0. {without}")
    if torch is None or not at_least(torch, RAGGED_TORCH):
        upgrade = f"pip install --upgrade 'torch>={RAGGED_TORCH}'"
        return Check(name, "advice", f"optional; comes with torch {RAGGED_TORCH}. {without}", upgrade)
    return Check(name, "ok", "part of torch; the package flash-attn is not used")
