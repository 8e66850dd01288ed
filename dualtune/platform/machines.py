"""Machines to buy or rent, by short name: `check-gpu --machine h100-80` judges a machine other than this one.

Memory is what the driver reports for the card (MiB), and for Macs the nominal size (GiB). Packages are those of a
complete installation, so that the verdict is about the hardware.
"""

from __future__ import annotations

from difflib import get_close_matches

from dualtune.errors import ConfigError
from dualtune.platform.apple import metal_limit
from dualtune.platform.budget import GPU_RESERVE_BYTES
from dualtune.platform.machine import GIB, Gpu, Machine
from dualtune.platform.rates import MachineLimits, limits_of, limits_or_none

_MIB = 2**20
_TORCH = {"torch": "2.13.0+cu130", "bitsandbytes": "0.50.2", "transformers": "5.23.0"}
_OLD_TORCH = _TORCH | {"torch": "2.13.0+cu126"}  # the last builds with code for compute capability 7.0
_MLX = {"transformers": "5.23.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}

# short name -> (name, MiB, compute capability, MIG profile)
_CARDS: dict[str, tuple[str, int, str, str | None]] = {
    "h200": ("NVIDIA H200", 143771, "9.0", None),
    "h100-80": ("NVIDIA H100 80GB HBM3", 81559, "9.0", None),
    "h100-mig-1g.10gb": ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9856, "9.0", "1g.10gb"),
    "h100-mig-3g.40gb": ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40320, "9.0", "3g.40gb"),
    "b200": ("NVIDIA B200", 183359, "10.0", None),
    "a100-80": ("NVIDIA A100 80GB PCIe", 81920, "8.0", None),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 40960, "8.0", None),
    "l40s": ("NVIDIA L40S", 46068, "8.9", None),
    "l4": ("NVIDIA L4", 23034, "8.9", None),
    "a10g": ("NVIDIA A10G", 23028, "8.6", None),
    "rtx-6000-ada-48": ("NVIDIA RTX 6000 Ada Generation", 49140, "8.9", None),
    "rtx-4000-ada-20": ("NVIDIA RTX 4000 Ada Generation", 20475, "8.9", None),
    "rtx-5090-32": ("NVIDIA GeForce RTX 5090", 32607, "12.0", None),
    "rtx-5080-16": ("NVIDIA GeForce RTX 5080", 16303, "12.0", None),
    "rtx-4090-24": ("NVIDIA GeForce RTX 4090", 24564, "8.9", None),
    "rtx-4080-16": ("NVIDIA GeForce RTX 4080", 16376, "8.9", None),
    "rtx-4060-8": ("NVIDIA GeForce RTX 4060", 8188, "8.9", None),
    "rtx-3090-24": ("NVIDIA GeForce RTX 3090", 24576, "8.6", None),
    "rtx-3060-12": ("NVIDIA GeForce RTX 3060", 12288, "8.6", None),
    "rtx-2080-ti-11": ("NVIDIA GeForce RTX 2080 Ti", 11264, "7.5", None),
    "t4": ("Tesla T4", 15360, "7.5", None),
    "v100-32": ("Tesla V100-SXM2-32GB", 32768, "7.0", None),
    "v100-16": ("Tesla V100-SXM2-16GB", 16384, "7.0", None),
    "p100": ("Tesla P100-PCIE-16GB", 16384, "6.0", None),
}
# short name -> (chip, GiB of unified memory)
_MACS = {
    "m1-8": ("Apple M1", 8),
    "m1-16": ("Apple M1", 16),
    "m1-max-64": ("Apple M1 Max", 64),
    "m2-ultra-192": ("Apple M2 Ultra", 192),
    "m3-pro-18": ("Apple M3 Pro", 18),
    "m3-pro-36": ("Apple M3 Pro", 36),
    "m4-16": ("Apple M4", 16),
    "m4-24": ("Apple M4", 24),
    "m4-32": ("Apple M4", 32),
    "m4-pro-48": ("Apple M4 Pro", 48),
    "m4-max-64": ("Apple M4 Max", 64),
    "m4-max-128": ("Apple M4 Max", 128),
}
_CPUS = {"cpu-16": 16, "cpu-64": 64, "cpu-256": 256}  # GiB of memory


def _with_card(name: str, mib: int, capability: str, mig: str | None) -> Machine:
    old = capability.startswith(("6.", "7.0"))
    gpu = Gpu(name, mib * _MIB, mib * _MIB - GPU_RESERVE_BYTES, capability, uuid=f"GPU-{name}", mig=mig)
    return Machine(
        system="Linux",
        arch="x86_64",
        python="3.12.0",
        cpu="x86-64 processor",
        cores=16,
        memory_bytes=128 * GIB,
        available_bytes=120 * GIB,
        gpus=[gpu],
        driver="580.95.05",
        cuda="13.0",
        packages=_OLD_TORCH if old else _TORCH,
        torch_cuda="12.6" if old else "13.0",
    )


def _mac(chip: str, gib: int) -> Machine:
    limit_bytes, source = metal_limit(gib * GIB, None)
    return Machine(
        system="Darwin",
        arch="arm64",
        python="3.12.0",
        cpu=chip,
        cores=10,
        memory_bytes=gib * GIB,
        available_bytes=(gib - 4) * GIB,
        packages=_MLX,
        cpu_features=("NEON",),
        macos="15.6",
        metal_limit_bytes=limit_bytes,
        metal_limit_source=source,
    )


def _with_cpu(gib: int) -> Machine:
    return Machine(
        system="Linux",
        arch="x86_64",
        python="3.12.0",
        cpu="x86-64 processor",
        cores=16,
        memory_bytes=gib * GIB,
        available_bytes=(gib - 2) * GIB,
        gpu_problem="NVML Shared Library Not Found",
        gpu_fault="no library",
        packages=_TORCH | {"torch": "2.13.0+cpu"},
        torch_cuda="none",
    )


MACHINES: dict[str, Machine] = (
    {name: _with_card(*card) for name, card in _CARDS.items()}
    | {name: _mac(*mac) for name, mac in _MACS.items()}
    | {name: _with_cpu(gib) for name, gib in _CPUS.items()}
)


def named(name: str) -> Machine:
    """Return the machine with a short name. ConfigError lists the names."""
    if name in MACHINES:
        return MACHINES[name]
    near = get_close_matches(name, MACHINES, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"--machine: got '{name}', allowed: {', '.join(MACHINES)}.{hint}")


def published(machine: Machine) -> MachineLimits | None:
    """Return the published limits of a machine's GPU or chip, by its name; None if they are not known."""
    own = _accelerator(machine)
    same = (name for name, known in MACHINES.items() if own and _accelerator(known) == own)
    return next((found for name in same if (found := limits_or_none(name))), None)


def limits_for(name: str) -> MachineLimits:
    """Return the published limits of the machine with a short name. ConfigError lists those that have some."""
    return limits_of(name, [*MACHINES])


def _accelerator(machine: Machine) -> str | None:
    return machine.gpus[0].name if machine.gpus else machine.cpu if machine.is_apple_silicon else None
