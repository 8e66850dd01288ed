"""Adapters that train on their merge as it will be quantized, on MLX (`dualtune.model.merge_rounding`).

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

import math
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear

from dualtune.model.adapter import AdapterSpec
from dualtune.model.merge_rounding import ROUNDINGS, Rounding, check_plain, pieces
from dualtune_mlx.dora import DoRALinear
from dualtune_mlx.experts import ExpertLoRA
from dualtune_mlx.lora import LoRALinear
from dualtune_mlx.methods import AdaptedLayer, DropoutSeeds, times_weight, weight_of


class Merge:
    """The rounded merge of a layer, or what it is made of where the base moves. Not a Module, so that the model's
    parameters are only the base's."""

    rounded: mx.array
    weights: dict[str, Any]  # what is trained in float32: in a pass that of the compute dtype is bound


class Rounded(AdaptedLayer):
    """A layer that computes with its rounded merge in training and in evaluations."""

    weights: Any  # of the layer: its attributes are what is trained
    dropout_seeds: DropoutSeeds
    _round: Rounding
    _merge: Merge

    def round_for(self, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        self._round, self._merge, self.dropout_seeds = ROUNDINGS[spec.merge_for], Merge(), seeds

    @property
    def computes_merged(self) -> bool:
        return self.dropout_seeds.seeds_BT is not None or self.dropout_seeds.is_evaluated

    def rounded(self, dtype: mx.Dtype) -> mx.array:
        """Return the rounded merge with the present weights."""
        raise NotImplementedError

    def merged(self, dtype: mx.Dtype) -> mx.array:
        """Return the rounded merge to compute with."""
        if not self.moves:
            return self._merge.rounded
        bound = {**vars(self.weights)}
        try:
            vars(self.weights).update(self._merge.weights)
            return mx.stop_gradient(self.rounded(dtype))
        finally:
            vars(self.weights).update(bound)

    def derived(self, dtype: mx.Dtype) -> mx.array | None:
        """Return the rounded merge; None where the base moves, which is rounded in each pass."""
        if not self.moves:
            return self.rounded(dtype)
        self._merge.weights = {**vars(self.weights)}
        return None

    def bind_derived(self, derived: mx.array) -> None:
        self._merge.rounded = derived


class MergedLoRALinear(Rounded, LoRALinear):
    """y = Q(W + ΔW) x + b in training and in evaluations, with the rounding Q; elsewhere what its method computes.

    Q has no slope, so what is trained gets the gradient of the weight that is rounded, as if it were not
    ("straight-through", Bengio et al., arXiv 1308.3432). Dropout adds ΔW (drop(x) - x): what it adds without a
    rounding.
    """

    def __init__(self, base: nn.Module, module: str, spec: AdapterSpec, *of_lora: Any) -> None:
        check_plain(module, spec.merge_for, is_plain=isinstance(base, nn.Linear))
        super().__init__(base, module, spec, *of_lora)
        self.round_for(spec, self.shared.dropout_seeds)

    def __call__(self, x_BTI: mx.array) -> mx.array:
        if not self.computes_merged:
            return super().__call__(x_BTI)
        y_BTO = x_BTI @ self.merged(x_BTI.dtype).T
        if "bias" in self.base:
            y_BTO = y_BTO + cast(mx.array, self.base.bias)
        if not self.dropout_seeds.is_evaluated:
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

    def rounded(self, dtype: mx.Dtype) -> mx.array:
        return self._round(weight_of(self.base) + self.delta(), mx).astype(dtype)


class MergedDoRALinear(MergedLoRALinear, DoRALinear):
    def unrounded(self, x_BTI: mx.array) -> mx.array:
        z_BTO = times_weight(x_BTI, self.base) + super().change(x_BTI)
        return self.scaled(z_BTO, z_BTO)

    def change(self, x_BTI: mx.array) -> mx.array:
        u_BTO = super().change(x_BTI)
        return self.scaled(u_BTO, u_BTO)


class MergedExpertLoRA(Rounded, ExpertLoRA):
    """The same for one projection of all experts."""

    def __init__(self, base: nn.Module, stack: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        check_plain(stack, spec.merge_for, is_plain=isinstance(base, SwitchLinear))
        super().__init__(base, stack, spec, seeds)
        self.round_for(spec, seeds)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if not self.computes_merged:
            return super().__call__(x, indices, sorted_indices)
        weights_EIO = self.merged(x.dtype).swapaxes(-1, -2)
        y = mx.gather_mm(x, weights_EIO, rhs_indices=indices, sorted_indices=sorted_indices)
        if "bias" in self.base:
            y = y + cast(mx.array, self.base.bias)[indices][..., None, :]
        if not self.dropout_seeds.is_evaluated:
            own = self.change(mx.stop_gradient(x), indices, sorted_indices)
            y = y + (own - mx.stop_gradient(own))
        return y + self.change(self.dropped(x, sorted_indices) - x, indices, sorted_indices) if self.drops else y

    def rounded(self, dtype: mx.Dtype) -> mx.array:
        A_ErI, B_EOr, weight_EOI = self.weights.lora_A_ErI, self.weights.lora_B_EOr, cast(mx.array, self.base.weight)
        rounded: list[mx.array] = []
        for some in pieces(len(weight_EOI), math.prod(self.shape)):
            merge_EOI = weight_EOI[some].astype(mx.float32) + self.scale * (B_EOr[some] @ A_ErI[some])
            rounded.append(self._round(merge_EOI.flatten(0, 1), mx).reshape(merge_EOI.shape).astype(dtype))
        return mx.concatenate(rounded)


def _make(base: nn.Module, module: str, spec: AdapterSpec, *of_lora: Any) -> MergedLoRALinear:
    return {"lora": MergedLoRALinear, "dora": MergedDoRALinear}[spec.method](base, module, spec, *of_lora)


LAYER, EXPERTS = _make, MergedExpertLoRA
