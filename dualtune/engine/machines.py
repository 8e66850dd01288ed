"""Machines to buy or rent, by short name: `check-gpu --machine h100-80` judges a machine other than this one.

Memory is what the driver reports for the card (MiB), and for Macs the nominal size (GiB). Packages are those of a
complete installation, so that the verdict is about the hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dualtune.base.errors import ConfigError
from dualtune.base.text import closest, did_you_mean
from dualtune.engine.detect import metal_limit
from dualtune.engine.machine import GIB, GPU_RESERVE_BYTES, Gpu, Machine

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
_APPLE: dict[str, tuple[float, float, float]] = {  # chip -> TFLOP/s, GB/s, bfloat16
    "Apple M1": (2.6, 68.25, EMULATED),
    "Apple M1 Max": (10.4, 400, EMULATED),
    "Apple M2 Ultra": (27.2, 800, EMULATED),
    "Apple M3 Pro": (7.4, 150, 1.0),
    "Apple M4": (4.3, 120, 1.0),
    "Apple M4 Pro": (9.2, 273, 1.0),
    "Apple M4 Max": (18.4, 546, 1.0),
}


# A CPU is measured when it is asked for. What that takes too long to measure keeps the proportions of the machine of
# benchmarks/results/predict.json, one thread of an x86 processor with AVX2.
CPU_SIDE_SHARES: Mapping[int, float] = {16: 0.46, 48: 0.76, 64: 0.82, 128: 0.90, 256: 0.97, 576: 1.0}
CPU_ELEMENTWISE = 0.17  # of the rate of products in float32
CPU_LAUNCH_S = 70e-6


def _nvidia(
    tensor: float, plain: float, memory: float, bus: float, product_share: float, attention_share: float
) -> MachineLimits:
    return MachineLimits(
        "NVIDIA's data sheet",
        {"bfloat16": 1e12 * tensor, "float16": 1e12 * tensor, "float32": 1e12 * plain},
        elementwise_flops=1e12 * plain,
        bytes_per_s=1e9 * memory,
        link_bytes_per_s=1e9 * bus,
        launch_s=LAUNCH_S,
        wait_s=WAIT_S,
        product_share=product_share,
        attention_share=attention_share,
        memory_share=STREAMED,
    )


def _apple(tflops: float, memory: float, bfloat16: float) -> MachineLimits:
    return MachineLimits(
        "Apple's figures",
        {"float32": 1e12 * tflops, "float16": 1e12 * tflops, "bfloat16": 1e12 * tflops * bfloat16},
        elementwise_flops=1e12 * tflops,
        bytes_per_s=1e9 * memory,
        link_bytes_per_s=None,
        launch_s=METAL_LAUNCH_S,
        wait_s=WAIT_S,
        product_share=METAL_SHARE,
        attention_share=METAL_SHARE,
        memory_share=STREAMED,
    )


# ----------------------------------------------------------------------------------------------------------------------
_MIB = 2**20
_TORCH = {"torch": "2.13.0+cu130", "bitsandbytes": "0.50.2", "transformers": "5.23.0"}
_OLD_TORCH = _TORCH | {"torch": "2.13.0+cu126"}  # the last builds with code for compute capability 7.0
_MLX = {"transformers": "5.23.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}

# short name -> (name, MiB, compute capability)
_CARDS: dict[str, tuple[str, int, str]] = {
    "h200": ("NVIDIA H200", 143771, "9.0"),
    "h100-80": ("NVIDIA H100 80GB HBM3", 81559, "9.0"),
    "h100-mig-1g.10gb": ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9856, "9.0"),
    "h100-mig-3g.40gb": ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40320, "9.0"),
    "b200": ("NVIDIA B200", 183359, "10.0"),
    "a100-80": ("NVIDIA A100 80GB PCIe", 81920, "8.0"),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 40960, "8.0"),
    "l40s": ("NVIDIA L40S", 46068, "8.9"),
    "l4": ("NVIDIA L4", 23034, "8.9"),
    "a10g": ("NVIDIA A10G", 23028, "8.6"),
    "rtx-6000-ada-48": ("NVIDIA RTX 6000 Ada Generation", 49140, "8.9"),
    "rtx-4000-ada-20": ("NVIDIA RTX 4000 Ada Generation", 20475, "8.9"),
    "rtx-5090-32": ("NVIDIA GeForce RTX 5090", 32607, "12.0"),
    "rtx-5080-16": ("NVIDIA GeForce RTX 5080", 16303, "12.0"),
    "rtx-4090-24": ("NVIDIA GeForce RTX 4090", 24564, "8.9"),
    "rtx-4080-16": ("NVIDIA GeForce RTX 4080", 16376, "8.9"),
    "rtx-4060-8": ("NVIDIA GeForce RTX 4060", 8188, "8.9"),
    "rtx-3090-24": ("NVIDIA GeForce RTX 3090", 24576, "8.6"),
    "rtx-3060-12": ("NVIDIA GeForce RTX 3060", 12288, "8.6"),
    "rtx-2080-ti-11": ("NVIDIA GeForce RTX 2080 Ti", 11264, "7.5"),
    "t4": ("Tesla T4", 15360, "7.5"),
    "v100-32": ("Tesla V100-SXM2-32GB", 32768, "7.0"),
    "v100-16": ("Tesla V100-SXM2-16GB", 16384, "7.0"),
    "p100": ("Tesla P100-PCIE-16GB", 16384, "6.0"),
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


def _with_card(name: str, mib: int, capability: str) -> Machine:
    old = capability.startswith(("6.", "7.0"))
    mig = name.partition(" MIG ")[2] or None
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


# By the name of a GPU or a chip.
_LIMITS = {_CARDS[name][0]: _nvidia(*figures) for name, figures in _NVIDIA.items()} | {
    chip: _apple(*figures) for chip, figures in _APPLE.items()
}


def named(name: str) -> Machine:
    """Return the machine with a short name. ConfigError lists the names."""
    return _entry("--machine", name, MACHINES)


def published(machine: Machine) -> MachineLimits | None:
    """Return the published limits of a machine's GPU or chip; None if they are not known, as for a CPU."""
    if machine.gpus:
        return _LIMITS.get(machine.gpus[0].name)
    return _LIMITS.get(machine.cpu) if machine.is_apple_silicon else None


def limits_for(name: str) -> MachineLimits:
    """Return the published limits of the machine with a short name. ConfigError lists those that have some."""
    limits = {known: limits for known, machine in MACHINES.items() if (limits := published(machine))}
    return _entry("--predict", name, limits, "this, ")


Entry = TypeVar("Entry")


def _entry(option: str, name: str, table: Mapping[str, Entry], others: str = "") -> Entry:
    if name in table:
        return table[name]
    near = closest(name, table)
    hint = f" {did_you_mean(near)}" if near else ""
    raise ConfigError(f"{option}: got '{name}', allowed: {others}{', '.join(table)}.{hint}")
