"""Limits for the difference between two computations of the same model, by the precisions of both.

The measured numbers are maxima over a pretrained model of 260 thousand weights (stories260k) and a random one of
120 thousand, each with a strong and a weak adapter, torch and MLX on a CPU, both directions, base and adapter:
`pytest tests/transfer/test_verify_thresholds.py -s` measures most of them again. No large model has been measured;
quantization hurts small models more than large ones, so these limits are rather too wide. A limit is three times the
measured number, in float32 more, because larger models round more often. int8 was measured with a strong adapter of the
pretrained model alone; its limits are those of affine8, which has as many bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

DTYPES = ("float32", "float16", "bfloat16")
# Rounding to 16 bits changes the effect of an adapter by up to 0.18 nats (root mean square; stories260k, bfloat16 on a
# quantized base). An adapter with less than four times this effect is not judged by it.
MIN_EFFECT_IN_16_BITS = 0.7
# The base without the adapter is the control: it shows the effect of precision on this model. The adapter's KL may be
# four times the base's (measured: 1.9 times, between the maxima of each row), or a fiftieth of the row if that is more.
CONTROL, MIN_SHARE = 4.0, 0.02


@dataclass(frozen=True, slots=True)
class Precision:
    """How a base model was loaded: "none" or the name of a quantization, and the dtype of the computation."""

    quantization: str
    dtype: str | None  # None: an older dualtune did not record it

    @property
    def options(self) -> str:
        """The options of `dualtune verify` for this precision."""
        dtype = f" --dtype {self.dtype}" if self.dtype in DTYPES else ""
        if not self.quantization.isidentifier():  # it has no name, so only a stored model can have it
            return f"a --base that is stored as {self.quantization}" + (dtype and f", and{dtype}")
        return f"--quantization {self.quantization}{dtype}"

    @property
    def is_16_bit(self) -> bool:
        return self.dtype in ("float16", "bfloat16", None)

    def __str__(self) -> str:
        return f"{'plain' if self.quantization == 'none' else self.quantization}, {self.dtype or 'dtype not recorded'}"


@dataclass(frozen=True, slots=True)
class Limit:
    """The maximum of each number (of top-1 agreement: the minimum)."""

    kl: float  # mean over the positions, nats
    logprob: float  # largest difference of a log-probability
    top1: float  # share of positions with the same most probable token
    effect: float | None  # relative error of the adapter's effect; None if the others are stricter. B = 0 has 1


class Row(NamedTuple):
    measured: Limit
    allowed: Limit


TABLE: dict[str, Row] = {
    "float32": Row(Limit(2.2e-10, 2.6e-5, 1.00, None), Limit(1e-6, 1e-3, 0.95, None)),
    "float16": Row(Limit(8.4e-6, 5.7e-2, 0.97, None), Limit(3e-5, 0.2, 0.90, None)),
    "bfloat16": Row(Limit(6.9e-4, 0.52, 0.93, None), Limit(2e-3, 1.6, 0.80, None)),
    "16 bits on a quantized base": Row(Limit(2.1e-2, 1.6, 0.82, None), Limit(0.07, 5.0, 0.60, None)),
    "affine8 / none": Row(Limit(8.0e-3, 1.7, 0.88, 0.18), Limit(0.025, 5.0, 0.75, 0.50)),
    "affine4 / none": Row(Limit(0.19, 4.1, 0.53, 0.52), Limit(0.57, 13.0, 0.30, 0.75)),
    "nf4 / none": Row(Limit(0.18, 6.7, 0.50, 0.53), Limit(0.55, 20.0, 0.30, 0.75)),
    "affine4 / affine8": Row(Limit(0.17, 4.2, 0.53, 0.55), Limit(0.55, 13.0, 0.30, 0.75)),
    "affine8 / nf4": Row(Limit(0.20, 6.7, 0.50, 0.54), Limit(0.60, 20.0, 0.30, 0.75)),
    "int8 / none": Row(Limit(7.1e-4, 0.27, 0.97, 0.021), Limit(0.025, 5.0, 0.75, 0.50)),
    "affine4 / int8": Row(Limit(0.19, 3.2, 0.62, 0.34), Limit(0.55, 13.0, 0.30, 0.75)),
    "int8 / nf4": Row(Limit(0.15, 4.6, 0.62, 0.34), Limit(0.60, 20.0, 0.30, 0.75)),
    "affine4 / nf4": Row(Limit(0.37, 8.5, 0.40, 0.71), Limit(1.10, 25.0, 0.20, 0.90)),
}


def limit_for(pair: str) -> Limit | None:
    """Return the limit for a pair of precisions; None for a pair that was not measured."""
    return TABLE[pair].allowed if pair in TABLE else None


def with_control(limit: Limit, base_kl: float) -> Limit:
    """Return the limit for the adapter if the base without it differs by `base_kl` from its record."""
    return replace(limit, kl=min(limit.kl, max(CONTROL * base_kl, MIN_SHARE * limit.kl)))


def pair_of(recorded: Precision, here: Precision) -> str:
    """Return the row of TABLE for two precisions.

    If both have the same quantization, and so the same base, the coarser dtype decides. Otherwise only the
    quantizations do: their gap is far wider than that of any dtype. An unrecorded dtype counts as the coarsest.
    """
    if recorded.quantization != here.quantization:
        return " / ".join(sorted((recorded.quantization, here.quantization)))
    dtypes = {recorded.dtype, here.dtype}
    if recorded.quantization != "none" and (recorded.is_16_bit or here.is_16_bit):
        return "16 bits on a quantized base"
    return "bfloat16" if dtypes & {None, "bfloat16"} else "float16" if "float16" in dtypes else "float32"
