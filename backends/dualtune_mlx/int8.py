"""int8 on MLX: `dualtune.model.int8` to the bit, and the frozen layer that computes with it.

Legend: O output and I input features of a weight.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx import nn

from dualtune.model.int8 import LARGEST_CODE, LEAST_SCALE

WEIGHTS_AT_ONCE = 1 << 20  # quantized at a time, with a few float32 for each


def quantize(weight_OI: mx.array) -> tuple[mx.array, mx.array]:
    """Return the codes, int8 [O, I], and the scales, float32 [O], of a matrix in any dtype. They are evaluated.

    On the CPU: a division on a GPU may be rounded differently.
    """
    rows = max(1, WEIGHTS_AT_ONCE // weight_OI.shape[1])
    with mx.stream(mx.cpu):
        parts = [_quantized(weight_OI[start : start + rows]) for start in range(0, len(weight_OI), rows)]
        codes, scales = (mx.concatenate([*tensors]) for tensors in zip(*parts, strict=True))
        mx.eval(codes, scales)
    return codes, scales


def _quantized(weight_OI: mx.array) -> tuple[mx.array, mx.array]:
    weight_OI = weight_OI.astype(mx.float32)
    scale_O = mx.abs(weight_OI).max(axis=1) / LARGEST_CODE
    scale_O = mx.where(scale_O < LEAST_SCALE, 0.0, scale_O)
    divisor_O = mx.where(scale_O == 0, mx.inf, scale_O)  # anything / ∞ = 0
    codes_OI = mx.round(weight_OI / divisor_O[:, None]).astype(mx.int8)
    mx.eval(codes_OI, scale_O)  # now, so that the float32 of one part are in memory and not those of all
    return codes_OI, scale_O


def dequantize(codes_OI: mx.array, scale_O: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return code · scale, computed in float32 and rounded once to `dtype`."""
    return (codes_OI.astype(mx.float32) * scale_O[:, None]).astype(dtype)


class Int8Linear(nn.Module):
    """Replaces an nn.Linear. The parameter `weight` holds the codes."""

    def __init__(self, codes_OI: mx.array, scale_O: mx.array, bias: mx.array | None) -> None:
        super().__init__()
        self.weight = codes_OI
        self.scales = scale_O
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(x)
        return y + self.bias if "bias" in self else y

    def product(self, x: mx.array) -> mx.array:
        """Return x Wᵀ, without the bias."""
        return cast(mx.array, _product(x, self.weight, self.scales))

    def unpacked(self, dtype: mx.Dtype) -> mx.array:
        return dequantize(self.weight, self.scales, dtype)


@mx.custom_function
def _product(x: mx.array, codes_OI: mx.array, scale_O: mx.array) -> mx.array:
    """x Wᵀ. Both passes unpack W: autograd would keep all unpacked matrices of the model for the backward pass."""
    return x @ _unpacked_after(x, codes_OI, scale_O).T


@_product.vjp
def _(primals: tuple[mx.array, ...], slope: mx.array, output: mx.array) -> tuple[Any, ...]:
    _, codes_OI, scale_O = primals
    return slope @ _unpacked_after(slope, codes_OI, scale_O), mx.zeros_like(codes_OI), mx.zeros_like(scale_O)


def _unpacked_after(x: mx.array, codes_OI: mx.array, scale_O: mx.array) -> mx.array:
    """Unpack W once x is known, in its dtype: MLX evaluates in any order, and would unpack many layers in advance."""
    (codes_OI,) = mx.depends([codes_OI], [x])
    return dequantize(codes_OI, scale_O, x.dtype)
