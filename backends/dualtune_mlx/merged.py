"""Adapters that train on their merge as it will be quantized, on MLX (`dualtune.model.merge_rounding`).

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx import nn

from dualtune.model.adapter import AdapterSpec
from dualtune.model.merge_rounding import ROUNDINGS, check_plain
from dualtune_mlx.dora import DoRALinear
from dualtune_mlx.lora import LoRALinear
from dualtune_mlx.methods import times_weight, weight_of


class Merge:
    """The rounded merge of a layer, or what it is made of where the base moves. Not a Module, so that the model's
    parameters are only the base's."""

    rounded_OI: mx.array
    factors: tuple[mx.array, mx.array]  # A and B in float32: in a pass those of the compute dtype are bound


class MergedLoRALinear(LoRALinear):
    """y = Q(W + ΔW) x + b in training and in evaluations, with the rounding Q; elsewhere what its method computes.

    Q has no slope, so what is trained gets the gradient of the weight that is rounded, as if it were not
    ("straight-through", Bengio et al., arXiv 1308.3432). Dropout adds ΔW (drop(x) - x): what it adds without a
    rounding.
    """

    def __init__(self, base: nn.Module, module: str, spec: AdapterSpec, *of_lora: Any) -> None:
        check_plain(module, is_plain=isinstance(base, nn.Linear))
        super().__init__(base, module, spec, *of_lora)
        self._round = ROUNDINGS[spec.merge_for]
        self._merge = Merge()

    def __call__(self, x_BTI: mx.array) -> mx.array:
        seeds = self.shared.dropout_seeds
        if seeds.seeds_BT is None and not seeds.is_evaluated:
            return super().__call__(x_BTI)
        y_BTO = x_BTI @ (self._rounded_now(x_BTI.dtype) if self.moves else self._merge.rounded_OI).T
        if "bias" in self.base:
            y_BTO = y_BTO + cast(mx.array, self.base.bias)
        if not seeds.is_evaluated:
            # Added and taken away: its value is in the merge, its gradient that of what is trained.
            own_BTO = self.unrounded(mx.stop_gradient(x_BTI))
            y_BTO = y_BTO + (own_BTO - mx.stop_gradient(own_BTO))
        return y_BTO + self.change(self.shared.after_dropout(x_BTI) - x_BTI) if self.shared.drops else y_BTO

    def unrounded(self, x_BTI: mx.array) -> mx.array:
        """Return all of the output that depends on what is trained."""
        return self.change(x_BTI)

    def change(self, x_BTI: mx.array) -> mx.array:
        """Return what A and B contribute to the output."""
        A_rI, B_Or = self.weights.lora_A_rI, self.weights.lora_B_Or
        u_BTr = self.scale * (x_BTI @ A_rI.T.astype(x_BTI.dtype))
        return (u_BTr.flatten(0, -2) @ B_Or.T.astype(x_BTI.dtype)).reshape(*x_BTI.shape[:-1], -1)

    def derived(self, dtype: mx.Dtype) -> mx.array | None:
        """Return the rounded merge [O, I]; None where the base moves, which is rounded in each pass."""
        if not self.moves:
            return self._rounded(dtype)
        self._merge.factors = self.weights.lora_A_rI, self.weights.lora_B_Or
        return None

    def _rounded_now(self, dtype: mx.Dtype) -> mx.array:
        weights = self.weights
        bound, (weights.lora_A_rI, weights.lora_B_Or) = (weights.lora_A_rI, weights.lora_B_Or), self._merge.factors
        try:
            return mx.stop_gradient(self._rounded(dtype))
        finally:
            weights.lora_A_rI, weights.lora_B_Or = bound

    def _rounded(self, dtype: mx.Dtype) -> mx.array:
        return self._round(weight_of(self.base) + self.delta(), mx).astype(dtype)

    def bind_derived(self, derived: mx.array) -> None:
        self._merge.rounded_OI = derived


class MergedDoRALinear(MergedLoRALinear, DoRALinear):
    def unrounded(self, x_BTI: mx.array) -> mx.array:
        z_BTO = times_weight(x_BTI, self.base) + super().change(x_BTI)
        return self.scaled(z_BTO, z_BTO)

    def change(self, x_BTI: mx.array) -> mx.array:
        u_BTO = super().change(x_BTI)
        return self.scaled(u_BTO, u_BTO)


def _make(base: nn.Module, module: str, spec: AdapterSpec, *of_lora: Any) -> MergedLoRALinear:
    return {"lora": MergedLoRALinear, "dora": MergedDoRALinear}[spec.method](base, module, spec, *of_lora)


LAYER = _make
