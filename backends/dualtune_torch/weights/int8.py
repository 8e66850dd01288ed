"""int8 on torch: `dualtune.model.int8` to the bit, on any device, and the frozen layer that computes with it.

Legend: O output and I input features of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualtune.model.int8 import LARGEST_CODE, LEAST_SCALE
from dualtune_torch.weights.packed import WEIGHTS_AT_ONCE, PackedLayer, product


def quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, int8 [O, I], and the scales, float32 [O], of a matrix in any dtype."""
    parts = [_quantized(rows.float().contiguous()) for rows in weight_OI.split(_rows_at_once(weight_OI))]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantized(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    # A tensor: CUDA would multiply by the reciprocal of a plain number, which rounds differently.
    scale_O = weight_OI.abs().amax(dim=1) / torch.tensor(float(LARGEST_CODE), device=weight_OI.device)
    scale_O = torch.where(scale_O < LEAST_SCALE, 0.0, scale_O)
    divisor_O = torch.where(scale_O == 0, torch.inf, scale_O)  # anything / ∞ = 0
    return (weight_OI / divisor_O[:, None]).round_().to(torch.int8), scale_O


def dequantize(codes_OI: Tensor, scale_O: Tensor, dtype: torch.dtype) -> Tensor:
    """Return code · scale, computed in float32 and rounded once to `dtype`."""
    weight_OI = torch.empty(codes_OI.shape, dtype=dtype, device=codes_OI.device)
    # CUDA converts each number as it reads and writes it; a CPU has codes and products of a call in float32, too.
    at_once = len(codes_OI) if weight_OI.is_cuda else _rows_at_once(codes_OI)
    split = (tensor.split(at_once) for tensor in (codes_OI, scale_O[:, None], weight_OI))
    for codes, scale, out in zip(*split, strict=True):
        torch.mul(codes, scale, out=out)
    return weight_OI


def _rows_at_once(matrix: Tensor) -> int:
    return max(1, WEIGHTS_AT_ONCE // matrix.shape[1])


class Int8Linear(PackedLayer):
    """Replaces an nn.Linear, or GPT-2's Conv1D."""

    parts = ("weight", "scales")
    bits = 8
    scales: Tensor

    def __init__(self, weight_OI: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(*quantize(weight_OI))
        self.out_features, self.in_features = self.shape
        self.bias = bias

    @property
    def shape(self) -> tuple[int, int]:
        out_features, in_features = self.weight.shape
        return out_features, in_features

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.weight, self.scales, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self)
