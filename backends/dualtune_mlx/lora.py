"""LoRA on MLX: a wrapper around a frozen linear layer, plain or quantized.

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from dualtune.adapter.dropout import MIX1, MIX2, SHIFT, channel_keys, input_of, threshold
from dualtune.adapter.gpt2 import canonical_name
from dualtune.adapter.spec import LoraSpec, select_modules


class Noise:
    """The token keys of the running micro-batch, shared by all adapted layers. None: dropout is off."""

    noise_BT: mx.array | None = None


class Weights:
    """The adapter's two matrices. Not a Module: the model's parameters stay the base's, and these are bound to
    whatever the running function is differentiated by."""

    lora_A_rI: mx.array
    lora_B_Or: mx.array


class SharedInput:
    """The products A x of the layers that read the same x: dropped once, and multiplied once, by their A stacked.

    Which layers these are is known by name (`input_of`); that they were really called with one and the same array
    is seen at every call, and an x of its own gets a product of its own.
    """

    def __init__(self, module: str, in_dim: int, dropout: float, noise: Noise) -> None:
        self.members: list[Weights] = []
        self.dropout = dropout
        self.noise = noise
        self._keys_I = mx.array(channel_keys(module, in_dim))
        self._x_BTI: mx.array | None = None
        self._waiting: dict[int, mx.array] = {}  # the products that their layers have not asked for yet

    def product(self, weights: Weights, x_BTI: mx.array) -> mx.array:
        """A x of one member, [B, T, r], in the dtype of x."""
        if x_BTI is not self._x_BTI or id(weights) not in self._waiting:
            self._x_BTI = x_BTI
            stacked_RI = mx.concatenate([member.lora_A_rI for member in self.members]).astype(x_BTI.dtype)
            dropped_BTI = self._dropped(x_BTI) if self.noise.noise_BT is not None and self.dropout else x_BTI
            products = mx.split(dropped_BTI @ stacked_RI.T, len(self.members), axis=-1)
            self._waiting = {id(member): u_BTr for member, u_BTr in zip(self.members, products, strict=True)}
        u_BTr = self._waiting.pop(id(weights))
        if not self._waiting:
            self._x_BTI = None  # x is kept no longer than needed
        return u_BTr

    def _dropped(self, x_BTI: mx.array) -> mx.array:
        """`dualtune.adapter.dropout.keep_mask` on the device."""
        assert self.noise.noise_BT is not None
        h_BTI = (self.noise.noise_BT[..., None] ^ self._keys_I) * mx.array(MIX1, mx.uint32)
        h_BTI = (h_BTI ^ (h_BTI >> SHIFT)) * mx.array(MIX2, mx.uint32)
        keep_BTI = h_BTI.view(mx.int32) >= threshold(self.dropout)
        return x_BTI * keep_BTI * (1.0 / (1.0 - self.dropout))


class LoRALinear(nn.Module):
    """y = W x + b + scale · B (A x), with A and B in float32 and the products in the dtype of x.

    Hu et al., LoRA, arXiv 2106.09685. Dropout acts on the x that A sees, as in PEFT.
    """

    def __init__(
        self, base: nn.Module, module: str, spec: LoraSpec, noise: Noise, shared: SharedInput | None = None
    ) -> None:
        super().__init__()
        self.base = base
        self.scale = spec.scale
        self.weights = Weights()
        self.shared = shared or SharedInput(module, linear_shape(base)[1], spec.dropout, noise)
        self.shared.members.append(self.weights)

    def __call__(self, x_BTI: mx.array) -> mx.array:
        y_BTO = self.base(x_BTI)
        u_BTr = self.scale * self.shared.product(self.weights, x_BTI)
        return y_BTO + u_BTr @ self.weights.lora_B_Or.T.astype(x_BTI.dtype)


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """(out, in) of a linear layer; a quantized one packs 32 / bits weights into a word."""
    out_dim, in_dim = cast(mx.array, layer.weight).shape
    return out_dim, in_dim * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else in_dim


def add_lora(model: nn.Module, spec: LoraSpec, noise: Noise, *, group: bool) -> dict[str, LoRALinear]:
    """Wrap the targeted linear layers in place. Returns canonical module path -> wrapper, sorted by path.

    `group`: layers that read the same activations share the product with their stacked A; else each has its own.
    """
    paths = {canonical_name(p): p for p, m in model.named_modules() if isinstance(m, (nn.Linear, nn.QuantizedLinear))}
    modules = dict(model.named_modules())
    linear = {name: modules[path] for name, path in paths.items()}
    shapes = {path: linear_shape(layer) for path, layer in linear.items()}
    shared: dict[tuple[str, int], SharedInput] = {}
    wrapped: dict[str, LoRALinear] = {}
    for path, (_, in_dim) in select_modules(shapes, spec.targets).items():
        reads = (input_of(path), in_dim)
        wrapped[path] = LoRALinear(linear[path], path, spec, noise, shared.get(reads) if group else None)
        shared[reads] = wrapped[path].shared
    model.update_modules(tree_unflatten([(paths[name], layer) for name, layer in wrapped.items()]))
    return wrapped


def storage(layers: dict[str, LoRALinear]) -> dict[str, int]:
    """How the frozen weights of these layers lie in memory: how many there are, and their bytes, scales included."""
    bases = [layer.base for layer in layers.values()]
    parts = ("weight", "scales", "biases")  # of a quantized layer; a plain one has the first alone
    return {
        "layers": len(bases),
        "four_bit": sum(isinstance(base, nn.QuantizedLinear) and base.bits == 4 for base in bases),
        "parameters": sum(out * in_ for out, in_ in map(linear_shape, bases)),
        "bytes": sum(base[part].nbytes for base in bases for part in parts if part in base),
    }
