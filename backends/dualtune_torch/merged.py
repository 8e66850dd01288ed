"""Adapters that train on their merge as it will be quantized, on torch (`dualtune.model.merge_rounding`).

Legend: B rows, T tokens, I input features, O output features.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from dualtune.model.adapter import AdapterSpec
from dualtune.model.merge_rounding import ROUNDINGS, Rounding, check_plain, pieces
from dualtune_torch.dora import DoRALinear
from dualtune_torch.experts import ExpertLoRA
from dualtune_torch.kernels.products import linear
from dualtune_torch.lora import LoRALinear
from dualtune_torch.methods import AdaptedLayer, DropoutSeeds
from dualtune_torch.mixture import Projection
from dualtune_torch.weights.frozen import FrozenLinear, weight_of
from dualtune_torch.weights.packed import product
from dualtune_torch.weights.stacks import PackedStack


class Rounded(AdaptedLayer):
    """A layer that computes with its rounded merge in training and in evaluations."""

    dropout_seeds: DropoutSeeds
    _round: Rounding
    _merge: Tensor | None = None  # in one place, which graphs read
    _is_rounded = False

    @property
    def computes_merged(self) -> bool:
        return self.dropout_seeds.seeds_BT is not None or self.dropout_seeds.is_evaluated

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the rounded merge with the present weights."""
        raise NotImplementedError

    @torch.no_grad()
    def rounded_once(self, dtype: torch.dtype) -> Tensor:
        """Return the rounded merge, computed once after each change of the adapter; in each pass if the base moves."""
        if self._is_rounded and self._merge is not None:
            return self._merge
        merge = self.rounded(dtype)
        if self.moves:
            return merge
        self._merge, self._is_rounded = merge if self._merge is None else self._merge.copy_(merge), True
        return self._merge

    def refresh(self) -> None:
        super().refresh()
        self._is_rounded = False


class MergedLoRALinear(Rounded, LoRALinear):
    """y = Q(W + ΔW) x + b in training and in evaluations, with the rounding Q; elsewhere what its method computes.

    Q has no slope, so what is trained gets the gradient of the weight that is rounded, as if it were not
    ("straight-through", Bengio et al., arXiv 1308.3432). Dropout adds ΔW (drop(x) - x): what it adds without a
    rounding.
    """

    grouped = False

    def __init__(self, base: FrozenLinear, module: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        check_plain(module, spec.merge_for, is_plain=base.weight.is_floating_point())
        super().__init__(base, module, spec, seeds)
        self._round = ROUNDINGS[spec.merge_for]

    def forward(self, x_BTI: Tensor) -> Tensor:
        if not self.computes_merged:
            return super().forward(x_BTI)
        # Autograd would keep a merge for the backward pass; of a base that moves it is made again there.
        y_BTO = product(x_BTI, self) if self.moves else linear(x_BTI, self.rounded_once(x_BTI.dtype), self.bias)
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

    def rounded(self, dtype: torch.dtype) -> Tensor:
        weight_OI = weight_of(self.base, torch.float32).float() + self.delta()
        return cast(Tensor, self._round(weight_OI, torch)).to(dtype)

    unpacked = Rounded.rounded_once  # what `product` multiplies by

    def prepare(self, dtype: torch.dtype) -> None:
        super().prepare(dtype)
        self.rounded_once(dtype)


class MergedDoRALinear(MergedLoRALinear, DoRALinear):
    def unrounded(self, x_BTI: Tensor) -> Tensor:
        return self.scaled(linear(x_BTI, weight_of(self.base, x_BTI.dtype)) + self.update(x_BTI))

    def change(self, x_BTI: Tensor) -> Tensor:
        return self.scaled(self.update(x_BTI))


class MergedExpertLoRA(Rounded, ExpertLoRA):
    """The same for one projection of all experts: `AdaptedExperts` computes with its merges."""

    def __init__(self, projection: Projection, stack: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        weight = getattr(projection.experts, projection.parameter)
        check_plain(stack, spec.merge_for, is_plain=not isinstance(weight, PackedStack))
        super().__init__(projection, stack, spec, seeds)
        self._round = ROUNDINGS[spec.merge_for]

    def forward(self, x_SI: Tensor, tokens_S: Tensor, ends_E: Tensor) -> Tensor:
        if not self.computes_merged:
            return super().forward(x_SI, tokens_S, ends_E)
        change_SO = x_SI.new_zeros(len(x_SI), self.shape[0])
        if not self.dropout_seeds.is_evaluated:
            own_SO = self.update(x_SI.detach(), ends_E)
            change_SO = own_SO - own_SO.detach()
        if not self.drops:
            return change_SO
        return change_SO + self.update(self.after_dropout(x_SI, tokens_S) - x_SI, ends_E)

    def merged(self, dtype: torch.dtype) -> Tensor | None:
        return self.rounded_once(dtype) if self.computes_merged else None

    def rounded(self, dtype: torch.dtype) -> Tensor:
        weights_EOI, (A_ErI, B_EOr) = self.projection.weights(), self.factors()
        merged_EOI = torch.empty(weights_EOI.shape, dtype=dtype, device=weights_EOI.device)
        for some in pieces(self.projection.count, math.prod(self.shape)):
            merge_EOI = weights_EOI[some].float() + self.scale * (B_EOr[some] @ A_ErI[some])
            merged_EOI[some] = cast(Tensor, self._round(merge_EOI.flatten(0, 1), torch)).view_as(merge_EOI)
        return merged_EOI

    def refresh(self) -> None:
        super().refresh()
        self._merge = None  # that of a stack is large, and gone before the next one is made


def _make(base: FrozenLinear, module: str, spec: AdapterSpec, seeds: DropoutSeeds) -> MergedLoRALinear:
    return {"lora": MergedLoRALinear, "dora": MergedDoRALinear}[spec.method](base, module, spec, seeds)


LAYER, EXPERTS = _make, MergedExpertLoRA
