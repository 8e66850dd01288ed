"""Adapters that train on their merge as it will be quantized, on torch (`dualtune.model.merge_rounding`).

Legend: B rows, T tokens, I input features, O output features.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dualtune.model.adapter import AdapterSpec
from dualtune.model.merge_rounding import ROUNDINGS, check_plain, pieces
from dualtune_torch.dora import DoRALinear
from dualtune_torch.experts import ExpertLoRA, Projection
from dualtune_torch.lora import LoRALinear
from dualtune_torch.methods import DropoutSeeds
from dualtune_torch.weights.frozen import FrozenLinear, weight_of
from dualtune_torch.weights.stacks import PackedStack


class MergedLoRALinear(LoRALinear):
    """y = Q(W + ΔW) x + b in training and in evaluations, with the rounding Q; elsewhere what its method computes.

    Q has no slope, so what is trained gets the gradient of the weight that is rounded, as if it were not
    ("straight-through", Bengio et al., arXiv 1308.3432). Dropout adds ΔW (drop(x) - x): what it adds without a
    rounding.
    """

    grouped = False

    def __init__(self, base: FrozenLinear, module: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        check_plain(module, is_plain=base.weight.is_floating_point())
        super().__init__(base, module, spec, seeds)
        self._round = ROUNDINGS[spec.merge_for]
        self._merged_OI: Tensor | None = None  # in one place, which graphs read
        self._is_rounded = False

    def forward(self, x_BTI: Tensor) -> Tensor:
        if self.dropout_seeds.seeds_BT is None and not self.dropout_seeds.is_evaluated:
            return super().forward(x_BTI)
        y_BTO = F.linear(x_BTI, self.merged(x_BTI.dtype), self.bias)
        if not self.dropout_seeds.is_evaluated:
            # Added and taken away: its value is in the merge, its gradient that of what is trained.
            own_BTO = self.unrounded(x_BTI.detach())
            y_BTO = y_BTO + (own_BTO - own_BTO.detach())
        return y_BTO + self.change(self.after_dropout(x_BTI) - x_BTI) if self.drops else y_BTO

    def unrounded(self, x_BTI: Tensor) -> Tensor:
        """Return all of the output that depends on what is trained."""
        return self.change(x_BTI)

    def change(self, x_BTI: Tensor) -> Tensor:
        """Return what A and B contribute to the output."""
        return self.update(x_BTI)

    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the rounded merge [O, I], computed once after each change of the adapter; in each pass if the base
        moves."""
        if self._is_rounded and self._merged_OI is not None:
            return self._merged_OI
        with torch.no_grad():
            weight_OI = weight_of(self.base, torch.float32).float() + self.delta()
            merged_OI = cast(Tensor, self._round(weight_OI, torch)).to(dtype)
            if self.moves:
                return merged_OI
            self._merged_OI = merged_OI if self._merged_OI is None else self._merged_OI.copy_(merged_OI)
        self._is_rounded = True
        return self._merged_OI

    def prepare(self, dtype: torch.dtype) -> None:
        super().prepare(dtype)
        self.merged(dtype)

    def refresh(self) -> None:
        super().refresh()
        self._is_rounded = False


class MergedDoRALinear(MergedLoRALinear, DoRALinear):
    def unrounded(self, x_BTI: Tensor) -> Tensor:
        return self.scaled(F.linear(x_BTI, weight_of(self.base, x_BTI.dtype)) + self.update(x_BTI))

    def change(self, x_BTI: Tensor) -> Tensor:
        return self.scaled(self.update(x_BTI))


class MergedExpertLoRA(ExpertLoRA):
    """The same for one projection of all experts: `AdaptedExperts` computes with its merges."""

    def __init__(self, projection: Projection, stack: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        weight = getattr(projection.experts, projection.parameter)
        check_plain(stack, is_plain=not isinstance(weight, PackedStack))
        super().__init__(projection, stack, spec, seeds)
        self._round = ROUNDINGS[spec.merge_for]
        self._merged_EOI: Tensor | None = None

    def forward(self, x_SI: Tensor, tokens_S: Tensor, ends_E: Tensor) -> Tensor:
        if not self._computes_merged:
            return super().forward(x_SI, tokens_S, ends_E)
        change_SO = x_SI.new_zeros(len(x_SI), self.shape[0])
        if not self.dropout_seeds.is_evaluated:
            own_SO = self.update(x_SI.detach(), ends_E)
            change_SO = own_SO - own_SO.detach()
        if self.dropout_seeds.seeds_BT is None or not self.dropout:
            return change_SO
        return change_SO + self.update(self.after_dropout(x_SI, tokens_S) - x_SI, ends_E)

    @property
    def _computes_merged(self) -> bool:
        return self.dropout_seeds.seeds_BT is not None or self.dropout_seeds.is_evaluated

    def merged(self, dtype: torch.dtype) -> Tensor | None:
        if not self._computes_merged or self._merged_EOI is not None:
            return self._merged_EOI if self._computes_merged else None
        merged_EOI = self._rounded(dtype)
        if not self.moves:
            self._merged_EOI = merged_EOI
        return merged_EOI

    @torch.no_grad()
    def _rounded(self, dtype: torch.dtype) -> Tensor:
        weights_EOI, (A_ErI, B_EOr) = self.projection.weights(), self.factors()
        merged_EOI = torch.empty(weights_EOI.shape, dtype=dtype, device=weights_EOI.device)
        for some in pieces(self.projection.count, math.prod(self.shape)):
            merge_EOI = weights_EOI[some].float() + self.scale * (B_EOr[some] @ A_ErI[some])
            merged_EOI[some] = cast(Tensor, self._round(merge_EOI.flatten(0, 1), torch)).view_as(merge_EOI)
        return merged_EOI

    def refresh(self) -> None:
        super().refresh()
        self._merged_EOI = None


def _make(base: FrozenLinear, module: str, spec: AdapterSpec, seeds: DropoutSeeds) -> MergedLoRALinear:
    return {"lora": MergedLoRALinear, "dora": MergedDoRALinear}[spec.method](base, module, spec, seeds)


LAYER, EXPERTS = _make, MergedExpertLoRA
