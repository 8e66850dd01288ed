"""What can prevent torch from using an NVIDIA GPU, found without importing torch."""

from __future__ import annotations

from collections.abc import Iterator

from dualtune.base.checks import Check
from dualtune.engine.machine import Gpu, Machine
from dualtune.engine.problems import (
    BFLOAT16_CAPABILITY,
    BLACKWELL_CAPABILITY,
    BLACKWELL_CUDA,
    CUDA_13_CAPABILITY,
    LEAST_CAPABILITY,
    NEW_DRIVER,
    at_least,
    row_or_problem,
    version,
)

DEFAULT_TORCH = "pip install --force-reinstall torch"  # on PyPI: for CUDA 13
OLD_TORCH = f"{DEFAULT_TORCH} --index-url https://download.pytorch.org/whl/cu126"
RAGGED_TORCH = "2.12"  # torch.nn.attention.varlen with grouped heads, which `kernels/attention.py` calls


def problems(machine: Machine) -> Iterator[Check]:
    """Yield a row for each problem of this machine that has a GPU."""
    if not machine.gpus:
        return
    torch, built_for, capability = machine.packages.get("torch"), machine.torch_cuda, machine.gpus[0].capability
    driver_cuda = version(machine.cuda or "13.0")
    # The newest torch that this driver and this GPU can use; where that is none, a newer driver.
    is_old = driver_cuda < (13,) or capability < CUDA_13_CAPABILITY
    fix = NEW_DRIVER if is_old and capability >= BLACKWELL_CAPABILITY else OLD_TORCH if is_old else DEFAULT_TORCH
    if not torch:
        yield Check("torch", "fail", "torch is not installed, and NVIDIA GPUs need it", "pip install 'dualtune[torch]'")
    if built_for == "none":
        yield Check("torch", "fail", f"torch {torch} is built without CUDA and sees no GPU", fix)
    built = version(built_for) if built_for not in (None, "none") else ()
    # Within one major version, CUDA runs on older drivers: docs.nvidia.com/deploy/cuda-compatibility.
    if built and machine.cuda is not None and built[0] > driver_cuda[0]:
        fault = f"torch is built for CUDA {built_for}, but driver {machine.driver} supports {machine.cuda} and older"
        yield Check("torch", "fail", fault, f"{NEW_DRIVER}. Or: {fix}")
    too_old = built >= (13,) and capability < CUDA_13_CAPABILITY
    too_new = built < BLACKWELL_CUDA and capability >= BLACKWELL_CAPABILITY
    if built and capability >= LEAST_CAPABILITY and (too_old or too_new):
        gpu = f"compute capability {machine.gpus[0].compute_capability}"
        yield Check("torch", "fail", f"torch is built for CUDA {built_for}, which has no code for {gpu}", fix)


def environment(machine: Machine) -> list[Check]:
    """Return the rows of `dualtune check-env` for a machine with a GPU."""
    torch = machine.packages.get("torch")
    return [_build_check(machine, torch), _attention_check(machine.gpus[0], torch)]


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
