"""DoRA on torch: a LoRA layer, each of whose outputs is scaled (`dualtune.model.methods.dora`).

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualtune.model.adapter import AdapterSpec
from dualtune.model.methods.dora import LEAST_NORM, LEAST_SHARE
from dualtune_torch.kernels.products import product
from dualtune_torch.lora import LoRALinear
from dualtune_torch.methods import DropoutSeeds
from dualtune_torch.weights.frozen import FrozenLinear, shape_of, weight_of


class DoRALinear(LoRALinear):
    """y = z + h ∘ (z - b), with z the output of the LoRA layer and 1 + h = m / ‖W + s B A‖.

    h is small in training, so that it keeps its digits where y is computed in 16 bits.
    """

    reads_base = True
    squares_O: Tensor  # ‖W‖² of each row
    norms_O: Tensor  # those of the sum, in one place

    def __init__(self, base: FrozenLinear, module: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        super().__init__(base, module, spec, seeds)
        rows_O = torch.empty(shape_of(base)[0], device=base.weight.device)
        self.register_buffer("squares_O", rows_O, persistent=False)
        self.lora_m = nn.Parameter(torch.empty_like(rows_O))
        self.register_buffer("norms_O", torch.empty_like(rows_O), persistent=False)
        self._is_stale = True

    def read_base(self) -> None:
        self.squares_O.copy_(_norms(weight_of(self.base, torch.float32)).square_())

    def forward(self, x_BTI: Tensor) -> Tensor:
        return self.scaled(super().forward(x_BTI), self.bias)

    def scaled(self, z_BTO: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return z + h ∘ (z - b)."""
        return cast(Tensor, _Scaled.apply(z_BTO, self.growth(z_BTO.dtype), bias_O))

    def growth(self, dtype: torch.dtype) -> Tensor:
        """Return h = m / ‖W + s B A‖ - 1, float32. `dtype`: that in which packed weights are unpacked.

        The norm is computed once after each change of the adapter: a step has it for all of its micro-batches.
        """
        self.prepare(dtype)
        return self.lora_m / self.norms_O - 1

    def prepare(self, dtype: torch.dtype) -> None:
        if self._is_stale:
            with torch.no_grad():
                self.norms_O.copy_(self._norms_of_sum(weight_of(self.base, dtype)))
            self._is_stale = False

    def _norms_of_sum(self, weight_OI: Tensor) -> Tensor:
        (A_rI, B_Or), s = self.factors(), self.scale
        product_Or = product(weight_OI, A_rI.T.to(weight_OI.dtype)).float()
        change_O = (B_Or * (2 * s * product_Or + s**2 * (B_Or @ (A_rI @ A_rI.T)))).sum(1)
        return (self.squares_O + change_O).maximum(LEAST_SHARE * self.squares_O).sqrt_().clamp_min_(LEAST_NORM)

    def refresh(self) -> None:
        self._is_stale = True

    def adapted(self, weight_OI: Tensor) -> Tensor:
        return super().adapted(weight_OI) * (1 + self.growth(weight_OI.dtype))[:, None].to(weight_OI.dtype)

    def trainable(self) -> dict[str, nn.Parameter]:
        return {**super().trainable(), "m": self.lora_m}

    def delta(self, number: int | None = None) -> Tensor:
        weight_OI = weight_of(self.base, torch.float32).float()
        sum_OI = super().delta().add_(weight_OI)
        factors_O = self.lora_m.detach() / _norms(sum_OI).clamp_min_(LEAST_NORM)
        return sum_OI.mul_(factors_O[:, None]).sub_(weight_OI)


class _Scaled(torch.autograd.Function):
    """z + h ∘ (z - b). The gradient of h is summed over the tokens in float32."""

    @staticmethod
    def forward(ctx: Any, z_BTO: Tensor, h_O: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(z_BTO, h_O, bias_O)
        return torch.addcmul(z_BTO, _without(z_BTO, bias_O), h_O.to(z_BTO.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BTO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        z_BTO, h_O, bias_O = ctx.saved_tensors
        dh_O = (g_BTO * _without(z_BTO, bias_O)).flatten(0, -2).sum(0, dtype=h_O.dtype)
        dbias_O = None
        if ctx.needs_input_grad[2]:  # what it has through z is z's
            dbias_O = (-h_O * g_BTO.flatten(0, -2).sum(0, dtype=h_O.dtype)).to(g_BTO.dtype)
        return torch.addcmul(g_BTO, g_BTO, h_O.to(g_BTO.dtype)), dh_O, dbias_O


def _without(z_BTO: Tensor, bias_O: Tensor | None) -> Tensor:
    return z_BTO if bias_O is None else z_BTO - bias_O


def _norms(weight_OI: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight_OI, dim=1, dtype=torch.float32)


LAYER = DoRALinear
