"""Machines to buy or rent, by short name: `check-gpu --machine h100-80` judges a machine other than this one.

Memory is what the driver reports for the card (MiB), and for Macs the nominal size (GiB). Packages are those of a
complete installation, so that the verdict is about the hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dualtune.base.errors import ConfigError
from dualtune.base.text import closest, did_you_mean
from dualtune.engine.detect import metal_limit
from dualtune.engine.machine import GIB, Gpu, Machine
from dualtune.engine.memory.budget import GPU_RESERVE_BYTES

# ----------------------------------------------------------------------------------------------------------------------
# The published limits of machines: products, memory, the bus; and which share of them a training step reaches.
#
# Products are dense, with sums in float32. A float32 product uses no tensor cores, because the engines leave TF32 off.
# Shares are assumptions, each with its reason: `dualtune bench` measures what a machine really reaches.


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What a machine can do at most, per second, and the shares of it that are reached."""

    source: str
    product_flops: Mapping[str, float]  # by dtype
    elementwise_flops: float  # float32, outside of matrix products
    bytes_per_s: float  # of the device's memory
    link_bytes_per_s: float | None  # between host and device, in one direction; None: they share the memory
    launch_s: float  # that the host needs to call an operator
    wait_s: float  # that the device is idle when the host waits for it
    product_share: float = 1.0
    attention_share: float = 1.0  # of product_flops
    memory_share: float = 1.0  # of bytes_per_s and link_bytes_per_s
    side_shares: Mapping[int, float] = field(default_factory=lambda: {})  # of products, by their shortest side
    # Bytes of an operator's data that stay in the cache, and the rate there; a GPU's cache is not counted on.
    cached: tuple[float, float] | None = None
    is_asynchronous: bool = True  # whether the host works while the device does


# NVIDIA's datacentre cards lower their clock under sustained products: an H200 reaches 788 of 989 TFLOP/s. Consumer
# cards are limited by their tensor cores instead, which keep their clock.
DATACENTRE, CONSUMER = 0.8, 0.9
# FlashAttention 2, forward and backward together: 300 of 989 TFLOP/s on an H100, 200 of 312 on an A100 (its
# repository's figures); it uses no instruction that is newer than the A100's.
FLASH_NEW, FLASH = 0.32, 0.6
STREAMED = 0.88  # of memory's bandwidth: an H200 copies with 4.3 of 4.8 TB/s
# Assumed: Python, autograd, the checks of compiled code and the driver. benchmarks/predict.py measured 70 µs on
# a shared server core, on which a plain operator alone takes 5; a core of its own is two to three times as fast.
LAUNCH_S = 20e-6
WAIT_S = 30e-6  # assumed: a synchronization, and the launches until the device is busy again

# short name -> TFLOP/s of tensor cores in 16 bits, of float32; GB/s of memory, of the bus in one direction; the shares
# of products and of attention. From the data sheets and architecture whitepapers of NVIDIA.
_NVIDIA: dict[str, tuple[float, float, float, float, float, float]] = {
    "b200": (2250, 75, 8000, 64, DATACENTRE, FLASH_NEW / 2),  # HGX B200 data sheet
    "h200": (989, 67, 4800, 64, DATACENTRE, FLASH_NEW),  # H200 data sheet, SXM
    "h100-80": (989, 67, 3350, 64, DATACENTRE, FLASH_NEW),  # H100 data sheet, SXM
    "h100-mig-3g.40gb": (989 * 3 / 7, 67 * 3 / 7, 3350 / 2, 64, DATACENTRE, FLASH_NEW),  # MIG user guide: 3/7, 4/8
    "h100-mig-1g.10gb": (989 / 7, 67 / 7, 3350 / 8, 64, DATACENTRE, FLASH_NEW),  # MIG user guide: 1/7, 1/8
    "a100-80": (312, 19.5, 1935, 32, DATACENTRE, FLASH),  # A100 data sheet, PCIe
    "a100-40": (312, 19.5, 1555, 32, DATACENTRE, FLASH),  # A100 data sheet, SXM
    "l40s": (362, 91.6, 864, 32, DATACENTRE, FLASH),  # L40S data sheet
    "l4": (121, 30.3, 300, 32, DATACENTRE / 2, FLASH / 2),  # L4 data sheet; 72 W do not keep its boost clock
    "rtx-6000-ada-48": (364.2, 91.1, 960, 32, DATACENTRE, FLASH),  # RTX 6000 Ada data sheet
    "rtx-5090-32": (209.5, 104.8, 1792, 64, CONSUMER, FLASH),  # RTX Blackwell whitepaper
    "rtx-5080-16": (112.6, 56.3, 960, 64, CONSUMER, FLASH),  # RTX Blackwell whitepaper
    "rtx-4090-24": (165.2, 82.6, 1008, 32, CONSUMER, FLASH),  # Ada whitepaper
    "rtx-4080-16": (97.5, 48.7, 716.8, 32, CONSUMER, FLASH),  # Ada whitepaper
    "rtx-4060-8": (30.2, 15.1, 272, 16, CONSUMER, FLASH),  # GeForce RTX 4060: as Ada, 2 tensor FLOP for one; 8 lanes
    "rtx-3090-24": (71, 35.6, 936, 32, CONSUMER, FLASH),  # Ampere GA102 whitepaper
    "rtx-3060-12": (25.5, 12.7, 360, 32, CONSUMER, FLASH),  # as GA102, 2 tensor FLOP for one
    "rtx-2080-ti-11": (53.8, 13.4, 616, 16, CONSUMER, FLASH),  # Turing whitepaper
    "t4": (65, 8.1, 320, 16, DATACENTRE / 2, FLASH / 2),  # T4 data sheet; 70 W do not keep its boost clock
    "v100-32": (125, 15.7, 900, 16, DATACENTRE, FLASH),  # V100 data sheet, SXM2
    "v100-16": (125, 15.7, 900, 16, DATACENTRE, FLASH),
}

# Macs: Apple publishes the bandwidth, and TFLOP/s of float32 for M1 and M2. Those of M3 and M4 are GPU cores × 128
# lanes × 2 × about 1.5 GHz. bfloat16 is as fast as float32, but M1 and M2 emulate it: 1.8 times as slow (issue 4216 of
# MLX). Products reach 0.8: 14.8 of 18.4 TFLOP/s were measured on an M4 Max.
METAL_SHARE, EMULATED = 0.8, 1 / 1.8
METAL_LAUNCH_S = 3e-6  # assumed: MLX encodes a primitive in C++, and an evaluation once for all
_APPLE: dict[str, tuple[float, float, float]] = {  # short name without memory -> TFLOP/s, GB/s, bfloat16
    "m1": (2.6, 68.25, EMULATED),
    "m1-max": (10.4, 400, EMULATED),
    "m2-ultra": (27.2, 800, EMULATED),
    "m3-pro": (7.4, 150, 1.0),
    "m4": (4.3, 120, 1.0),
    "m4-pro": (9.2, 273, 1.0),
    "m4-max": (18.4, 546, 1.0),
}


# A CPU is measured when it is asked for. What that takes too long to measure keeps the proportions of the machine of
# benchmarks/results/predict.json, one thread of an x86 processor with AVX2.
CPU_SIDE_SHARES: Mapping[int, float] = {16: 0.46, 48: 0.76, 64: 0.82, 128: 0.90, 256: 0.97, 576: 1.0}
CPU_ELEMENTWISE = 0.17  # of the rate of products in float32
CPU_LAUNCH_S = 70e-6


def _of_card(name: str) -> MachineLimits:
    tensor, plain, memory, bus, products, attention = _NVIDIA[name]
    dtypes = {"bfloat16": 1e12 * tensor, "float16": 1e12 * tensor, "float32": 1e12 * plain}
    return MachineLimits(
        "NVIDIA's data sheet", dtypes, 1e12 * plain, 1e9 * memory, 1e9 * bus, LAUNCH_S, WAIT_S, products, attention,
        STREAMED,
    )  # fmt: skip


def _of_mac(chip: str) -> MachineLimits:
    tflops, memory, bfloat16 = _APPLE[chip]
    dtypes = {"float32": 1e12 * tflops, "float16": 1e12 * tflops, "bfloat16": 1e12 * tflops * bfloat16}
    return MachineLimits(
        "Apple's figures", dtypes, 1e12 * tflops, 1e9 * memory, None, METAL_LAUNCH_S, WAIT_S, METAL_SHARE, METAL_SHARE,
        STREAMED,
    )  # fmt: skip


def limits_or_none(machine: str) -> MachineLimits | None:
    """Return the limits of a machine by its short name; None if they are not known, as for a CPU."""
    if machine in _NVIDIA:
        return _of_card(machine)
    chip = machine.rpartition("-")[0]
    return _of_mac(chip) if chip in _APPLE else None


def limits_of(machine: str, names: list[str]) -> MachineLimits:
    """Return the limits of a machine, of which there are these. ConfigError lists those with limits."""
    limits = limits_or_none(machine)
    if limits is not None and machine in names:
        return limits
    known = [name for name in names if limits_or_none(name)]
    near = closest(machine, known)
    hint = f" {did_you_mean(near)}" if near else ""
    raise ConfigError(f"--predict: got '{machine}', allowed: this, {', '.join(known)}.{hint}")


# ----------------------------------------------------------------------------------------------------------------------
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
    near = closest(name, MACHINES)
    hint = f" {did_you_mean(near)}" if near else ""
    raise ConfigError(f"--machine: got '{name}', allowed: {', '.join(MACHINES)}.{hint}")


def published(machine: Machine) -> MachineLimits | None:
    """Return the published limits of a machine's GPU or chip, by its name; None if they are not known."""
    own = _accelerator(machine)
    same = (name for name, known in MACHINES.items() if own and _accelerator(known) == own)
    return next((limits for name in same if (limits := limits_or_none(name))), None)


def limits_for(name: str) -> MachineLimits:
    """Return the published limits of the machine with a short name. ConfigError lists those that have some."""
    return limits_of(name, [*MACHINES])


def _accelerator(machine: Machine) -> str | None:
    return machine.gpus[0].name if machine.gpus else machine.cpu if machine.is_apple_silicon else None
