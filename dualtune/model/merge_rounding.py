"""How a format rounds a weight, for adapters that train on the model as it will be quantized after their merge.

Each function returns the weight that the format gives back, float32 [out, in], from a float32 weight [out, in]. A group
is that many neighbours in a row; a weight whose rows are not whole groups is returned as it is, as the exports leave it
plain. `xp` is numpy, torch or mlx.core: both backends round by the same operations in the same order.

Legend: O output and I input features, G groups of a row, K weights of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

from dualtune.base.errors import ConfigError

Array = Any  # of numpy, torch or mlx.core
Rounding = Callable[[Array, Any], Array]  # (weight [O, I], xp) -> its rounding [O, I]
MergeFor = Literal["none", "affine4", "affine8", "nf4", "q4_0", "q8_0"]

# The 16 values of NormalFloat: Dettmers et al., QLoRA, arXiv 2305.14314, appendix E.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


AT_ONCE = 1 << 26  # weights of experts that are rounded together: what is in between takes some times their memory


def pieces(count: int, size: int) -> Iterator[slice]:
    """Yield which of `count` experts of `size` weights each are rounded together. Rows are rounded alone."""
    many = max(1, AT_ONCE // size)
    yield from (slice(start, start + many) for start in range(0, count, many))


def check_plain(module: str, merge_for: MergeFor, *, is_plain: bool) -> None:
    """Raise ConfigError for a layer whose weight is packed.

    Its numbers are not those of the base that an export merges into: training would see the rounding of another merge.
    """
    if not is_plain:
        raise ConfigError(
            f"adapter.merge_for: got {merge_for}, but the base is quantized ({module}). An export rounds the merge "
            "with the plain base, whose numbers a quantized one has lost, so training would see another rounding. Load "
            "the plain base with model.quantization: none, or instead of quantized files the model that they were made "
            "from; or set adapter.merge_for: none, and use the adapter beside the quantized base"
        )


def _affine(w_OGK: Array, xp: Any, bits: int) -> Array:
    """MLX's `mx.quantize` with groups of 64, with scales and biases in float32 (`dualtune_torch.weights.affine`)."""
    low_OG1, high_OG1 = -_largest(-w_OGK, xp), _largest(w_OGK, xp)
    low_is_further = xp.abs(low_OG1) > xp.abs(high_OG1)
    scale_OG1 = xp.clip((high_OG1 - low_OG1) / (2**bits - 1), 1e-7, None)
    scale_OG1 = xp.where(low_is_further, scale_OG1, -scale_OG1)
    edge_OG1 = xp.where(low_is_further, low_OG1, high_OG1)
    q_OG1 = xp.round(edge_OG1 / scale_OG1)
    scale_OG1 = xp.where(q_OG1 == 0, scale_OG1, edge_OG1 / xp.where(q_OG1 == 0, 1.0, q_OG1))
    bias_OG1 = xp.where(q_OG1 == 0, 0.0, edge_OG1)
    return xp.clip(xp.round((w_OGK - bias_OG1) / scale_OG1), 0, 2**bits - 1) * scale_OG1 + bias_OG1


def _nf4(w_OGK: Array, xp: Any) -> Array:
    """bitsandbytes' NF4 in groups of 64, without its second quantization, of the scales, which costs 0.4 % of each."""
    scale_OG1 = _largest(xp.abs(w_OGK), xp)
    x_OGK = w_OGK / xp.where(scale_OG1 == 0, 1.0, scale_OG1)
    value_OGK = xp.zeros_like(x_OGK) + NF4_VALUES[0]
    for low, high in pairwise(NF4_VALUES):
        value_OGK = xp.where(x_OGK > (low + high) / 2, high, value_OGK)
    return value_OGK * scale_OG1


def _q8_0(w_OGK: Array, xp: Any) -> Array:
    """ggml's Q8_0: 32 codes of 8 bits with a scale in float16."""
    scale_OG1 = _largest(xp.abs(w_OGK), xp) / 127
    x_OGK = w_OGK * xp.where(scale_OG1 == 0, 0.0, 1 / xp.where(scale_OG1 == 0, 1.0, scale_OG1))
    codes_OGK = xp.sign(x_OGK) * xp.floor(xp.abs(x_OGK) + 0.5)  # halves away from zero
    return codes_OGK * _in_float16(scale_OG1, xp)


def _q4_0(w_OGK: Array, xp: Any) -> Array:
    """ggml's Q4_0: 32 codes of 4 bits with a scale in float16, of which the largest weight is -8."""
    low_OG1, high_OG1 = -_largest(-w_OGK, xp), _largest(w_OGK, xp)
    scale_OG1 = xp.where(-low_OG1 > high_OG1, low_OG1, high_OG1) / -8
    x_OGK = w_OGK * xp.where(scale_OG1 == 0, 0.0, 1 / xp.where(scale_OG1 == 0, 1.0, scale_OG1))
    codes_OGK = xp.clip(xp.floor(x_OGK + 8.5), 0, 15) - 8
    return codes_OGK * _in_float16(scale_OG1, xp)


def _largest(x_OGK: Array, xp: Any) -> Array:
    """The largest of each group, [O, G, 1]. torch's `max` along an axis is another function."""
    return (getattr(xp, "amax", None) or xp.max)(x_OGK, -1, keepdims=True)


def _in_float16(x: Array, xp: Any) -> Array:
    cast = x.astype if hasattr(x, "astype") else x.to
    half = cast(xp.float16)
    return half.astype(xp.float32) if hasattr(half, "astype") else half.to(xp.float32)


def _by_group(round_group: Callable[[Array, Any], Array], size: int, w_OI: Array, xp: Any) -> Array:
    if w_OI.shape[1] % size:
        return w_OI
    return round_group(w_OI.reshape(w_OI.shape[0], -1, size), xp).reshape(w_OI.shape)


ROUNDINGS: Mapping[str, Rounding] = MappingProxyType(
    {
        "affine4": partial(_by_group, partial(_affine, bits=4), 64),
        "affine8": partial(_by_group, partial(_affine, bits=8), 64),
        "nf4": partial(_by_group, _nf4, 64),
        "q4_0": partial(_by_group, _q4_0, 32),
        "q8_0": partial(_by_group, _q8_0, 32),
    }
)
