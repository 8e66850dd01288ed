"""DoRA on MLX: a LoRA layer, each of whose outputs is scaled (`dualtune.model.methods.dora`).

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import mlx.core as mx

from dualtune.model.methods.dora import LEAST_NORM, LEAST_SHARE
from dualtune_mlx.lora import LoRALinear
from dualtune_mlx.methods import times_weight, weight_of


class DoRALinear(LoRALinear):
    """y = z + h ∘ (z - b), with z the output of the LoRA layer and 1 + h = m / ‖W + s B A‖.

    h is small in training, so that it keeps its digits where y is computed in 16 bits.
    """

    def read_base(self) -> None:
        self._squares_O = mx.square(weight_of(self.base)).sum(axis=1)  # ‖W‖² of each row
        mx.eval(self._squares_O)  # now, so that one unpacked weight is in memory at a time

    def __call__(self, x_BTI: mx.array) -> mx.array:
        z_BTO = super().__call__(x_BTI)
        return self.scaled(z_BTO, self._without_bias(z_BTO))

    def scaled(self, z_BTO: mx.array, w_BTO: mx.array) -> mx.array:
        """Return z + h ∘ w."""
        return cast(mx.array, _plus_product(z_BTO, w_BTO, self.growth(z_BTO.dtype)))

    def growth(self, dtype: mx.Dtype) -> mx.array:
        """Return h = m / ‖W + s B A‖ - 1, float32. The norm is a constant in the gradient."""
        A_rI, B_Or, s = self.weights.lora_A_rI, self.weights.lora_B_Or.astype(mx.float32), self.scale
        product_rO = times_weight(A_rI.astype(dtype), self.base).astype(mx.float32)
        A_rI = A_rI.astype(mx.float32)
        change_O = (B_Or * (2 * s * product_rO.T + s**2 * (B_Or @ (A_rI @ A_rI.T)))).sum(axis=1)
        squares_O = mx.maximum(self._squares_O + change_O, LEAST_SHARE * self._squares_O)
        norms_O = mx.stop_gradient(mx.maximum(mx.sqrt(squares_O), LEAST_NORM))
        return self._m_O / norms_O - 1

    def bind(self, values: Mapping[str, mx.array]) -> None:
        super().bind(values)
        self._m_O = values["m"]

    def delta(self, number: int | None = None) -> mx.array:
        weight_OI = weight_of(self.base)
        sum_OI = weight_OI + super().delta()
        norms_O = mx.maximum(mx.linalg.norm(sum_OI, axis=1), LEAST_NORM)
        return (self._m_O / norms_O)[:, None] * sum_OI - weight_OI

    def _without_bias(self, z_BTO: mx.array) -> mx.array:
        return z_BTO - cast(mx.array, self.base.bias) if "bias" in self.base else z_BTO


@mx.custom_function
def _plus_product(z_BTO: mx.array, w_BTO: mx.array, h_O: mx.array) -> mx.array:
    """z + h ∘ w. The gradient of h is summed over the tokens in float32, whatever the dtype of z."""
    return z_BTO + h_O.astype(z_BTO.dtype) * w_BTO


@_plus_product.vjp
def _(primals: tuple[mx.array, ...], slope_BTO: mx.array, output: mx.array) -> tuple[mx.array, ...]:
    _, w_BTO, h_O = primals
    dh_O = (slope_BTO.astype(mx.float32) * w_BTO.astype(mx.float32)).flatten(0, -2).sum(axis=0)
    return slope_BTO, slope_BTO * h_O.astype(slope_BTO.dtype), dh_O


LAYER = DoRALinear
