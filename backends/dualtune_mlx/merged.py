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


class MergedLoRALinear(LoRALinear):
    """y = Q(W + scale · B A) x + b in training, with the rounding Q; elsewhere what LoRA computes.

    Q has no slope, so A and B get the gradient of the weight that is rounded, as if it were not ("straight-through",
    Bengio et al., arXiv 1308.3432).
    """

    def __init__(
        self, base: nn.Module, module: str, spec: AdapterSpec, seeds: DropoutSeeds, shared: SharedInput | None = None
    ) -> None:
        check_plain(module, is_plain=isinstance(base, nn.Linear))
        super().__init__(base, module, spec, seeds, shared)
        self._round = ROUNDINGS[spec.merge_for]

    def __call__(self, x_BTI: mx.array) -> mx.array:
        if self.shared.dropout_seeds.seeds_BT is None:
            return super().__call__(x_BTI)
        A_rI, B_Or = self.weights.lora_A_rI, self.weights.lora_B_Or
        change_OI = self.scale * (B_Or.astype(mx.float32) @ A_rI.astype(mx.float32))
        merged_OI = mx.stop_gradient(self._round(weight_of(self.base) + change_OI, mx)).astype(x_BTI.dtype)
        y_BTO = x_BTI @ merged_OI.T
        # The update is added and taken away: its value is in the merge, and its gradient is that of A and B.
        u_BTr = self.scale * (mx.stop_gradient(x_BTI) @ A_rI.T.astype(x_BTI.dtype))
        u_BTO = (u_BTr.flatten(0, -2) @ B_Or.T.astype(x_BTI.dtype)).reshape(y_BTO.shape)
        if "bias" in self.base:
            y_BTO = y_BTO + cast(mx.array, self.base.bias)
        return y_BTO + (u_BTO - mx.stop_gradient(u_BTO))


LAYER = MergedLoRALinear
