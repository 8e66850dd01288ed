"""LoRA that trains on the merge as it will be quantized, on MLX (`dualtune.model.merge_rounding`).

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx import nn

from dualtune.model.adapter import AdapterSpec
from dualtune.model.merge_rounding import ROUNDINGS, check_plain
from dualtune_mlx.lora import LoRALinear, SharedInput
from dualtune_mlx.methods import DropoutSeeds, weight_of


class Merge:
    """The rounded merge of a layer. Not a Module, so that the model's parameters are only the base's."""

    rounded_OI: mx.array


class MergedLoRALinear(LoRALinear):
    """y = Q(W + scale · B A) x + b in training and in evaluations, with the rounding Q; elsewhere what LoRA computes.

    Q has no slope, so A and B get the gradient of the weight that is rounded, as if it were not ("straight-through",
    Bengio et al., arXiv 1308.3432).
    """

    def __init__(
        self, base: nn.Module, module: str, spec: AdapterSpec, seeds: DropoutSeeds, shared: SharedInput | None = None
    ) -> None:
        check_plain(module, is_plain=isinstance(base, nn.Linear))
        super().__init__(base, module, spec, seeds, shared)
        self._round = ROUNDINGS[spec.merge_for]
        self._merge = Merge()

    def __call__(self, x_BTI: mx.array) -> mx.array:
        seeds = self.shared.dropout_seeds
        if seeds.seeds_BT is None and not seeds.is_evaluated:
            return super().__call__(x_BTI)
        y_BTO = x_BTI @ self._merge.rounded_OI.T
        if "bias" in self.base:
            y_BTO = y_BTO + cast(mx.array, self.base.bias)
        if seeds.is_evaluated:
            return y_BTO
        # The update is added and taken away: its value is in the merge, and its gradient is that of A and B.
        A_rI, B_Or = self.weights.lora_A_rI, self.weights.lora_B_Or
        u_BTr = self.scale * (mx.stop_gradient(x_BTI) @ A_rI.T.astype(x_BTI.dtype))
        u_BTO = (u_BTr.flatten(0, -2) @ B_Or.T.astype(x_BTI.dtype)).reshape(y_BTO.shape)
        return y_BTO + (u_BTO - mx.stop_gradient(u_BTO))

    def derived(self, dtype: mx.Dtype) -> mx.array:
        """Return the rounded merge [O, I]."""
        return self._round(weight_of(self.base) + self.delta(), mx).astype(dtype)

    def bind_derived(self, derived: mx.array) -> None:
        self._merge.rounded_OI = derived


LAYER = MergedLoRALinear
