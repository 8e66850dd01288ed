"""LoRA on torch: a wrapper around a frozen linear layer, and the plain code of what a kernel may compute in its place.

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import AdapterSpec
from dualtune.model.dropout import MIX1, MIX2, SHIFT, channel_keys, check_tokens, threshold
from dualtune_torch.kernels.products import add_product, write_product
from dualtune_torch.methods import AdaptedLayer, DropoutSeeds
from dualtune_torch.weights.frozen import FrozenLinear, as_stored, shape_of, weight_of


class GroupedForward(Protocol):
    """The fast path of layers that share an input: `dualtune_torch.kernels.lora`."""

    def __call__(self, layer: LoRALinear, x_BTI: Tensor, /) -> Tensor: ...


class LoRALinear(AdaptedLayer):
    """y = W x + b + scale · B (A x), with A and B in float32 and the products in the dtype of x.

    Hu et al., LoRA, arXiv 2106.09685. Dropout acts on the x that A sees, as in PEFT. The code here is the reference;
    a `group` computes the same.
    """

    grouped = True
    group: GroupedForward | None = None
    keys_I: Tensor

    def __init__(self, base: FrozenLinear, module: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        super().__init__()
        device = base.weight.device
        out_features, in_features = shape_of(base)
        self.base = base
        self.module = module
        self.scale, rank = spec.scale_of(module), spec.rank_of(module)
        self.dropout = spec.dropout
        self.dropout_seeds = seeds
        self.lora_A = nn.Parameter(torch.empty(rank, in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(out_features, rank, device=device))
        keys = torch.from_numpy(channel_keys(module, in_features).view("int32"))
        self.register_buffer("keys_I", keys.to(device), persistent=False)

    def forward(self, x_BTI: Tensor) -> Tensor:
        if self.group is not None:
            return self.group(self, x_BTI)
        return self.base(x_BTI) + self.update(self.after_dropout(x_BTI))

    @property
    def drops(self) -> bool:
        """Whether the current micro-batch has dropout."""
        return self.dropout_seeds.seeds_BT is not None and self.dropout > 0

    def after_dropout(self, x_BTI: Tensor) -> Tensor:
        if not self.drops:
            return x_BTI
        seeds_BT = self.dropout_seeds.seeds_BT
        assert seeds_BT is not None
        check_tokens(x_BTI.shape[:-1].numel(), seeds_BT.numel())
        seeds = seeds_BT.reshape(x_BTI.shape[:-1])  # an MLP beside experts gets [B · T, I]
        return dropped(x_BTI, seeds, self.keys_I, *drop_rule(self.dropout))

    def update(self, x_BTI: Tensor) -> Tensor:
        """Return scale · B (A x)."""
        A_rI, B_Or = self.factors()
        u_BTr = self.scale * F.linear(x_BTI, A_rI.to(x_BTI.dtype))
        return F.linear(u_BTr, B_Or.to(x_BTI.dtype))

    @property
    def weight(self) -> Tensor:
        """The weight with the adapter, in the base's orientation, for models that multiply by it themselves."""
        if self.drops:
            raise ConfigError(
                f"adapter.dropout: this model reads the weight of {self.module} instead of calling the layer, so the "
                "adapter's input is unknown. Set adapter.dropout: 0, or leave such layers out of adapter.targets"
            )
        if not self.base.weight.is_floating_point():
            raise ConfigError(
                f"model.quantization: this model reads the weight of {self.module} instead of calling the layer, and "
                "the weight is packed. Set model.quantization: none, or leave such layers out of adapter.targets"
            )
        return as_stored(self.base, self.adapted(weight_of(self.base, self.base.weight.dtype)))

    def adapted(self, weight_OI: Tensor) -> Tensor:
        """Return the weight with the adapter, as a function of the trainable parameters."""
        A_rI, B_Or = self.factors()
        return weight_OI + (self.scale * (B_Or @ A_rI)).to(weight_OI.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def trainable(self) -> dict[str, nn.Parameter]:
        return {"A": self.lora_A, "B": self.lora_B}

    def delta(self, number: int | None = None) -> Tensor:
        A_rI, B_Or = (factor.detach() for factor in self.factors())
        return (B_Or @ A_rI).mul_(self.scale)


def drop_rule(p: float) -> tuple[int, float]:
    """Return the lowest hash that is kept, and the factor of the kept values (faster than a division)."""
    return threshold(p), 1.0 / (1.0 - p)


def dropped(x: Tensor, seeds: Tensor, keys_I: Tensor, lowest: int, factor: float) -> Tensor:
    """Apply dropout to x [..., I]: zero channels by the tokens' seeds [...] and scale the others by `drop_rule`.

    `dualtune.model.dropout.keep_mask` in wrapping int32 arithmetic (torch has little for uint32).
    """
    h = (seeds[..., None] ^ keys_I) * signed(MIX1)
    h = (h ^ ((h >> SHIFT) & ((1 << (32 - SHIFT)) - 1))) * signed(MIX2)
    return x * (h >= lowest) * factor


def signed(value: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return value - (1 << 32) if value >= 1 << 31 else value


@dataclass(frozen=True, slots=True)
class LoRAPieces:
    """What the kernels of a LoRA group do for it; arguments and results are those of the plain code beside each."""

    down: Callable[..., Tensor] | None = None  # these three come together: the mask in registers
    add_dx: Callable[..., None] | None = None
    add_dA: Callable[..., None] | None = None
    back_g: Callable[..., None] | None = None


def back_g(g_MO: Tensor, B_Or: Tensor, u_Mr: Tensor, scale: float, v_Mr: Tensor, dB_Or: Tensor) -> None:
    """Write v = s · g B, and add s · gᵀ u to dB."""
    write_product(v_Mr, g_MO, B_Or, scale)
    add_product(dB_Or, g_MO.T, u_Mr, scale)


LAYER = LoRALinear
