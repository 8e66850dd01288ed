"""LoRA on MLX: a wrapper around a frozen linear layer, plain or quantized.

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import mlx.core as mx
from mlx import nn

from dualtune.engine.once_per_input import OncePerInput
from dualtune.model.adapter import AdapterSpec
from dualtune.model.dropout import MIX1, MIX2, SHIFT, channel_keys, check_tokens, threshold
from dualtune_mlx.adapter_inputs import Origins
from dualtune_mlx.methods import AdaptedLayer, DropoutSeeds, linear_shape


@dataclass(eq=False)
class Factors:
    """The adapter's two matrices. Not a Module, so that the model's parameters are only the base's. They are bound to
    the arrays by which the current function is differentiated."""

    rank: int
    scale: float
    lora_A_rI: mx.array = field(init=False)
    lora_B_Or: mx.array = field(init=False)


class SharedInput:
    """scale · A x of the layers that read the same x, with one dropout and one product by their stacked A."""

    def __init__(self, module: str, in_dim: int, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        self.members: list[Factors] = []
        self.dropout = spec.dropout
        self.dropout_seeds = seeds
        self.origins = Origins()
        self._keys_I = mx.array(channel_keys(module, in_dim))
        self._products = OncePerInput[int, mx.array]()  # by the identity of a member

    def product(self, weights: Factors, x_BTI: mx.array) -> mx.array:
        """Return scale · A x for one layer, [B, T, r], in the dtype of x."""
        return self._products.fetch(id(weights), x_BTI, self._compute)

    def _compute(self, x_BTI: mx.array) -> dict[int, mx.array]:
        stacked_RI = mx.concatenate([member.lora_A_rI for member in self.members]).astype(x_BTI.dtype)
        u_BTR = self.origins.product(self._multiply, x_BTI, stacked_RI, self.dropout_seeds.after)
        ends = [*accumulate(member.rank for member in self.members)]
        products = mx.split(self._scale(x_BTI.dtype) * u_BTR, ends[:-1], axis=-1)
        return {id(member): u_BTr for member, u_BTr in zip(self.members, products, strict=True)}

    def _scale(self, dtype: mx.Dtype) -> float | mx.array:
        """Return the scale of all members, or that of each rank."""
        first, *others = {member.scale for member in self.members}
        if not others:
            return first
        return mx.array([member.scale for member in self.members for _ in range(member.rank)], dtype)

    def _multiply(self, x_BTI: mx.array, stacked_RI: mx.array) -> mx.array:
        """Return the product of x, after dropout, by all A."""
        return self.after_dropout(x_BTI) @ stacked_RI.T

    def forget(self) -> None:
        """Drop the products that no layer has fetched."""
        self._products.forget()

    @property
    def drops(self) -> bool:
        """Whether the current micro-batch has dropout."""
        return self.dropout_seeds.seeds_BT is not None and self.dropout > 0

    def after_dropout(self, x_BTI: mx.array) -> mx.array:
        return self._dropped(x_BTI) if self.drops else x_BTI

    def _dropped(self, x_BTI: mx.array) -> mx.array:
        """`dualtune.model.dropout.keep_mask` on the device."""
        assert self.dropout_seeds.seeds_BT is not None
        tokens, seeds = x_BTI.shape[:-1], self.dropout_seeds.seeds_BT
        check_tokens(math.prod(tokens), seeds.size)
        h_BTI = (seeds.reshape(*tokens, 1) ^ self._keys_I) * mx.array(MIX1, mx.uint32)
        h_BTI = (h_BTI ^ (h_BTI >> SHIFT)) * mx.array(MIX2, mx.uint32)
        keep_BTI = h_BTI.view(mx.int32) >= threshold(self.dropout)
        return x_BTI * keep_BTI * (1.0 / (1.0 - self.dropout))


class LoRALinear(AdaptedLayer):
    """y = W x + b + scale · B (A x), with A and B in float32 and the products in the dtype of x.

    Hu et al., LoRA, arXiv 2106.09685. Dropout acts on the x that A sees, as in PEFT.
    """

    def __init__(
        self,
        base: nn.Module,
        module: str,
        spec: AdapterSpec,
        seeds: DropoutSeeds,
        shared: SharedInput | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.scale = spec.scale_of(module)
        self.weights = Factors(spec.width_of(module), self.scale)
        self.shared = shared or SharedInput(module, linear_shape(base)[1], spec, seeds)
        self.shared.members.append(self.weights)

    def __call__(self, x_BTI: mx.array) -> mx.array:
        y_BTO = self.base(x_BTI)
        u_BTr = self.shared.product(self.weights, x_BTI)
        B_rO = self.weights.lora_B_Or.T.astype(x_BTI.dtype)
        # One kernel for product and sum of all rows: else the gradient of B would be one product for each row.
        return mx.addmm(y_BTO.flatten(0, -2), u_BTr.flatten(0, -2), B_rO).reshape(y_BTO.shape)

    def bind(self, values: Mapping[str, mx.array]) -> None:
        self.weights.lora_A_rI, self.weights.lora_B_Or = values["A"], values["B"]

    def trace(self, origins: Origins) -> None:
        self.shared.origins = origins

    def forget(self) -> None:
        self.shared.forget()

    def delta(self, number: int | None = None) -> mx.array:
        return self.scale * (self.weights.lora_B_Or @ self.weights.lora_A_rI)


LAYER = LoRALinear
