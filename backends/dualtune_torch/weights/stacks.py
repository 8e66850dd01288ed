"""The matrices of all experts of one parameter, each packed on its own: unpacked one after another, where it is needed.

Legend: S pairs of a token and one of its experts, sorted by expert, I input and O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualtune_torch.kernels.products import write_product
from dualtune_torch.weights.frozen import FrozenLinear, is_four_bit, shape_of, stored_bytes, weight_of


class PackedStack(nn.Module):
    """Takes the place of a parameter [experts, out, in]."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (len(self.layers), *shape_of(self.layers[0]))

    @property
    def device(self) -> torch.device:
        return cast(FrozenLinear, self.layers[0]).weight.device

    @property
    def is_four_bit(self) -> bool:
        return is_four_bit(self.layers[0])

    @property
    def nbytes(self) -> int:
        return sum(map(stored_bytes, self.layers))

    def matrix(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] of one expert."""
        return weight_of(self.layers[number], dtype)

    def product(self, x_SI: Tensor, ends: list[int]) -> Tensor:
        """Return each row of x times the matrix of its expert. `ends`: where the rows of each expert end."""
        return cast(Tensor, _Product.apply(x_SI, self, ends))


class _Product(torch.autograd.Function):
    """The products of the experts that have rows. Nothing but the packed bytes is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, stack: PackedStack, ends: list[int]) -> Tensor:
        ctx.stack, ctx.ends, ctx.width = stack, ends, x_SI.shape[1]
        return by_group(x_SI, lambda number: stack.matrix(number, x_SI.dtype).T, stack.shape[1], ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_SO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return by_group(g_SO, lambda number: ctx.stack.matrix(number, g_SO.dtype), ctx.width, ctx.ends), None, None


def by_group(x_SI: Tensor, matrix_IO: Callable[[int], Tensor], width: int, ends: list[int]) -> Tensor:
    """Return each row of x times the matrix of its expert, one expert after another: the same order on every run."""
    y_SO = x_SI.new_empty(len(x_SI), width)
    for number, rows in groups(ends):
        write_product(y_SO[rows], x_SI[rows], matrix_IO(number))
    return y_SO


def groups(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield the number and the rows of each expert that has any."""
    begin = 0
    for number, end in enumerate(ends):
        if end > begin:
            yield number, slice(begin, end)
        begin = end
