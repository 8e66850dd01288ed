"""MLX's affine quantization on torch: the same bytes, the same numbers, and frozen layers that compute with them.

64 neighbours in a row of a weight share a scale and a bias, and each is scale · q + bias with q of 4 or 8 bits. Scale
and bias follow the rule of MLX's `mlx/backend/cpu/quantized.cpp`, with every operation in float32 and in the same
order, so the result is bitwise equal to that of `mx.quantize` on a CPU. Metal's kernel (`quantized.h`) differs in two
places: it rounds halves away from zero, and uses 0 as the largest weight of a group without a weight above 0. So
dualtune quantizes on the CPU on a Mac too. The bytes of a quantized model from elsewhere are not changed.

Legend: O output and I input features of a weight, G groups of a row, K = 64 weights of a group, W = I · bits / 8 packed
bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualtune_torch.weights.packed import WEIGHTS_AT_ONCE, PackedLayer, product

BITS = {"affine4": 4, "affine8": 8}
GROUP_SIZE = 64
EPS = 1e-7  # the least scale


class Packed(NamedTuple):
    """A weight as MLX stores it: its 32-bit words, lowest weight first, as the bytes of a little-endian machine."""

    weight_OW: Tensor  # uint8
    scales_OG: Tensor
    biases_OG: Tensor  # of the same dtype, which is also that of the unpacked weight

    @property
    def bits(self) -> int:
        return self.weight_OW.shape[-1] * 8 // (self.scales_OG.shape[-1] * GROUP_SIZE)

    def cast(self, dtype: torch.dtype) -> Packed:
        """Round scales and biases to another dtype, as MLX does for its compute dtype."""
        return Packed(self.weight_OW, self.scales_OG.to(dtype), self.biases_OG.to(dtype))


def quantize(weight_OI: Tensor, bits: int) -> Packed:
    """Compute the bytes of `mx.quantize(weight, 64, bits)`. Scales and biases have the weight's dtype."""
    rows = max(1, WEIGHTS_AT_ONCE // weight_OI.shape[1])
    parts = [_quantized(part.float(), bits) for part in weight_OI.split(rows)]
    return Packed(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))).cast(weight_OI.dtype)


def _quantized(weight_OI: Tensor, bits: int) -> Packed:
    weight_OGK = weight_OI.unflatten(1, (-1, GROUP_SIZE))
    low_OG, high_OG = weight_OGK.aminmax(dim=-1)
    # The end further from zero is represented exactly, and so is zero if the group spans it.
    low_is_further = low_OG.abs() > high_OG.abs()
    # A tensor: CUDA would multiply by the reciprocal of a plain number, which rounds differently.
    steps = torch.tensor(2.0**bits - 1, device=weight_OI.device)
    scale_OG = ((high_OG - low_OG) / steps).clamp(min=EPS)
    scale_OG = torch.where(low_is_further, scale_OG, -scale_OG)
    edge_OG = torch.where(low_is_further, low_OG, high_OG)
    q_OG = (edge_OG / scale_OG).round()
    scale_OG = torch.where(q_OG == 0, scale_OG, edge_OG / q_OG)
    bias_OG = torch.where(q_OG == 0, 0.0, edge_OG)
    q_OGK = (weight_OGK - bias_OG[..., None]).div_(scale_OG[..., None]).round_().clamp_(0, 2**bits - 1)
    q_OI = q_OGK.to(torch.uint8).flatten(1)
    return Packed(q_OI if bits == 8 else q_OI[:, 0::2] | (q_OI[:, 1::2] << 4), scale_OG, bias_OG)


def dequantize(packed: Packed) -> Tensor:
    """Compute `mx.dequantize` in the dtype of the scales: q · scale is rounded to it, and so is the sum.

    O may be any number of dimensions. MLX's matrix products may skip the rounding between the two in 16 bits.
    """
    weight, scales, biases = packed
    if packed.bits == 4:
        weight = weight.to(torch.int16)
        weight |= weight << 4
        weight &= 0x0F0F  # the lower four bits in the lower byte, which is the first one
        weight = weight.view(torch.uint8)
    numbers = weight.to(scales.dtype)
    numbers.unflatten(-1, (-1, GROUP_SIZE)).mul_(scales[..., None]).add_(biases[..., None])
    return numbers


class AffineLayer(PackedLayer):
    """A frozen matrix with MLX's tensors and names."""

    parts = ("weight", "scales", "biases")
    unpack: Callable[[Packed], Tensor] = staticmethod(dequantize)  # or a kernel that gives the same bits
    scales: Tensor
    biases: Tensor

    def __init__(self, packed: Packed) -> None:
        super().__init__(*packed)
        self.bits = packed.bits

    @property
    def packed(self) -> Packed:
        return Packed(*self.tensors)

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * GROUP_SIZE

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The dtype is that of the scales, which were cast to the compute dtype."""
        return self.unpack(self.packed)


class AffineLinear(AffineLayer):
    """Replaces an nn.Linear."""

    def __init__(self, packed: Packed, bias: nn.Parameter | None) -> None:
        super().__init__(packed)
        self.out_features, self.in_features = self.shape
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self)


class AffineEmbedding(AffineLayer):
    """Replaces an nn.Embedding: only the rows of the tokens are unpacked."""

    factor: Tensor | None

    def __init__(self, packed: Packed, factor: Tensor | None = None) -> None:
        """`factor` multiplies all rows, in models with a scaled embedding."""
        super().__init__(packed)
        self.register_buffer("factor", factor, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.unpack(Packed(self.weight[tokens], self.scales[tokens], self.biases[tokens]))
        return rows if self.factor is None else rows * self.factor.to(rows.dtype)
