"""LoRA that trains on the merge as it will be quantized, on torch (`dualtune.model.merge_rounding`).

Legend: B rows, T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dualtune.model.adapter import AdapterSpec
from dualtune.model.merge_rounding import ROUNDINGS, check_plain
from dualtune_torch.lora import LoRALinear
from dualtune_torch.methods import DropoutSeeds
from dualtune_torch.weights.frozen import FrozenLinear, weight_of


class MergedLoRALinear(LoRALinear):
    """y = Q(W + scale · B A) x + b in training and in evaluations, with the rounding Q; elsewhere what LoRA computes.

    Q has no slope, so A and B get the gradient of the weight that is rounded, as if it were not ("straight-through",
    Bengio et al., arXiv 1308.3432).
    """

    grouped = False

    def __init__(self, base: FrozenLinear, module: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        check_plain(module, is_plain=base.weight.is_floating_point())
        super().__init__(base, module, spec, seeds)
        self._round = ROUNDINGS[spec.merge_for]
        self._merged_OI: Tensor | None = None

    def forward(self, x_BTI: Tensor) -> Tensor:
        if self.dropout_seeds.is_evaluated:
            return F.linear(x_BTI, self.merged(x_BTI.dtype), self.bias)
        if self.dropout_seeds.seeds_BT is None:
            return super().forward(x_BTI)
        # The update is added and taken away: its value is in the merge, and its gradient is that of A and B.
        u_BTO = self.update(x_BTI.detach())
        return F.linear(x_BTI, self.merged(x_BTI.dtype), self.bias) + (u_BTO - u_BTO.detach())

    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the rounded merge [O, I]. It is computed once after each change of the adapter."""
        if self._merged_OI is None:
            with torch.no_grad():
                weight_OI = weight_of(self.base, torch.float32).float() + self.delta()
                self._merged_OI = cast(Tensor, self._round(weight_OI, torch)).to(dtype)
        return self._merged_OI

    def refresh(self) -> None:
        self._merged_OI = None


LAYER = MergedLoRALinear
