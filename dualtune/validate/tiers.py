"""The five tiers as data: a config each, the criteria for its run, and the changes on a CPU.

A CPU cannot run these models in the time of a test. There each tier has a twin: the same criteria and steps, on the
small model that is part of dualtune, with separate limits for quantities that depend on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from dualtune.card import card_of
from dualtune.errors import ConfigError
from dualtune.validate.criteria import Criterion

MB, GB = 10**6, 10**9
WINDOW = 50  # steps, for the mean loss and the growth of memory

RAN = (
    Criterion("device initialised", "device_is_ready", "==", 1, "yes"),
    Criterion("model on the device", "model_is_on_device", "==", 1, "yes"),
    Criterion("forward and backward ran", "passes_ran", "==", 1, "yes"),
    Criterion("no error of the device", "ran_to_the_end", "==", 1, "yes"),
    Criterion("steps not taken", "missing_steps", "==", 0),
    Criterion("losses that are not finite", "bad_losses", "==", 0),
)
ADAPTER_UPDATED = (
    Criterion("smallest gradient norm", "least_gradient", ">", 0, "number"),
    Criterion("adapter tensors unchanged", "unchanged_tensors", "==", 0),
)
IN_4_BIT = (
    Criterion("adapted layers not in 4 bits", "plain_layers", "==", 0),
    Criterion("bytes per weight of these layers", "bytes_per_weight", "<=", 0.55, "number"),
)
CONVERGED = (
    Criterion("loss decrease, first 10 to last 10 steps", "decrease", ">=", 0.30, "share", needs_pretrained=True),
)


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier."""

    name: str
    title: str
    config: str  # in configs/
    peak_bytes: int  # the device memory that its run may use
    criteria: tuple[Criterion, ...]


def _peak(limit: int, relation: Literal["<=", "<"] = "<=") -> Criterion:
    return Criterion("peak device memory", "peak_bytes", relation, limit, "bytes")


TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        tier.name: tier
        for tier in (
            Tier(
                "quick", "the pipeline runs", "gpu_smollm2_quick.yaml", 256 * MB,
                (*RAN, *IN_4_BIT, _peak(256 * MB), Criterion("elapsed", "elapsed", "<", 120, "seconds")),
            ),
            Tier(
                "convergence", "the adapter learns", "gpu_smollm2_convergence.yaml", 256 * MB,
                (*RAN, *ADAPTER_UPDATED, *CONVERGED, *IN_4_BIT, _peak(256 * MB),
                 Criterion("elapsed", "elapsed", "<=", 300, "seconds")),
            ),
            Tier(
                "memory", "a 4-bit model keeps to its memory", "gpu_tinyllama_memory.yaml", 2 * GB,
                (*RAN, *ADAPTER_UPDATED, *IN_4_BIT, _peak(2 * GB, "<")),
            ),
            Tier(
                "extended", "no leak, no drift, no slowdown", "gpu_tinyllama_extended.yaml", 2 * GB,
                (*RAN, *ADAPTER_UPDATED, *IN_4_BIT, _peak(2 * GB, "<"),
                 Criterion("memory growth after the first window", "growth", "<=", 0.01, "share"),
                 Criterion(
                     "largest rise of the loss between windows", "rise", "<=", 0.02, "share", needs_pretrained=True,
                 ),
                 Criterion("variation of tokens/s after step 20", "spread", "<=", 0.10, "share")),
            ),
            Tier(
                "full", "a 7B model, as in real use", "gpu_llama7b_full.yaml", 12 * GB,
                (*RAN, *ADAPTER_UPDATED, *CONVERGED, *IN_4_BIT, _peak(12 * GB, "<"),
                 Criterion("checkpoints missing or damaged", "missing_checkpoints", "==", 0)),
            ),
        )
    }
)  # fmt: skip
ALL = ("quick", "convergence", "memory", "extended")  # the meaning of `all`


def tiers_of(name: str) -> list[Tier]:
    """Return the tiers of a name, in order. "all" excludes the longest one, which must be named."""
    if name == "all":
        return [TIERS[each] for each in ALL]
    if name not in TIERS:
        raise ConfigError(f"--tier: got '{name}', allowed: {', '.join((*TIERS, 'all'))}")
    return [TIERS[name]]


# --- what a device changes -------------------------------------------------------------------------------------------

# How a backend stores a weight in 4 bits; the first format that it supports is used. The limits follow from the format.
#   nf4      0.5 and, per block of 64, one byte of scale with a share of a second scale: 0.516
#   affine4  0.5 and, per group of 64, a scale and a bias of 2 bytes each: 0.5625; in float32, of 4 bytes each: 0.625
FORMATS_4_BIT = ("nf4", "affine4")
BYTES_PER_WEIGHT = {"nf4": 0.55, "affine4": 0.57}
BYTES_PER_WEIGHT_ON_CPU = BYTES_PER_WEIGHT | {"affine4": 0.63}  # in float32, the dtype of `auto` there
BYTES_PER_WEIGHT_OF_TWIN = BYTES_PER_WEIGHT_ON_CPU | {"nf4": 0.62}  # a layer's two tables, 1088 bytes, count too

# A twin's model is small, so it needs larger steps to learn as much in the same number of steps.
TWIN_OVERRIDES = ("train.learning_rate=5e-3",)
# By measure: another limit, or the reason why it is not judged.
TWIN_LIMITS: Mapping[str, float | str] = MappingProxyType(
    {
        "growth": 0.05,  # of the process's resident memory, which C's allocator returns to the system with delay
        "spread": "the cores of a CPU are shared with other programs",
    }
)
# The real shapes on a CPU, with random weights.
CPU_LIMITS: Mapping[str, float | str] = MappingProxyType(
    {
        "peak_bytes": "the limit is that of a GPU, which computes in 16 bits",
        "elapsed": "the limit is that of a GPU",
        "growth": 0.05,
        "spread": TWIN_LIMITS["spread"],
    }
)


def criteria_of(tier: Tier, backend: str, quantization: str, *, on_cpu: bool, is_twin: bool) -> tuple[Criterion, ...]:
    """Return the tier's criteria for this device."""
    changes: dict[str, float | str] = {}
    if is_twin:
        changes |= {**TWIN_LIMITS, "peak_bytes": card_of(backend).twin.peak_bytes}
    elif on_cpu:
        changes |= CPU_LIMITS
    formats = BYTES_PER_WEIGHT_OF_TWIN if is_twin else BYTES_PER_WEIGHT_ON_CPU if on_cpu else BYTES_PER_WEIGHT
    changes["bytes_per_weight"] = formats[quantization]
    return tuple(_changed(criterion, changes.get(criterion.measure)) for criterion in tier.criteria)


def _changed(criterion: Criterion, change: float | str | None) -> Criterion:
    if change is None:
        return criterion
    return replace(criterion, not_judged=change) if isinstance(change, str) else replace(criterion, limit=change)
