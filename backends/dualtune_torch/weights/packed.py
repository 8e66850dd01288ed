"""A frozen matrix in a packed format: what all such formats share. Only the packed tensors are kept in memory."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from dualtune_torch.kernels.products import linear, times

WEIGHTS_AT_ONCE = 1 << 20  # packed at a time, with a few float32 for each: as many as fit in a CPU cache


class PackedLayer(nn.Module):
    """A frozen matrix [out, in] whose packed tensors are buffers, so that nothing takes them for its parameters."""

    parts: ClassVar[tuple[str, ...]]  # the names of these buffers; the first is "weight"
    bits: int  # of a weight, without what a group of weights shares
    weight: Tensor

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in zip(self.parts, tensors, strict=True):
            self.register_buffer(name, tensor)

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, part) for part in self.parts]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the unpacked matrix."""
        raise NotImplementedError

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Compute the matrix in the compute dtype of the model."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, bits={self.bits}"


class PackedProduct(Protocol):
    """A layer that computes x Wᵀ + b with a W that is made for each pass."""

    @property
    def bias(self) -> Tensor | None: ...

    def unpacked(self, dtype: torch.dtype) -> Tensor: ...


def product(x: Tensor, layer: PackedProduct) -> Tensor:
    """x Wᵀ + b of a frozen layer. Each pass unpacks W, and nothing is kept between them."""
    return _Product.apply(x, layer)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedProduct) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.unpacked(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return times(grad, ctx.layer.unpacked(grad.dtype)), None
