"""LoRA on MLX: a wrapper around a frozen linear layer, plain or quantized.

Legend: B rows, T tokens, I input features, O output features, r rank.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from dualtune.adapter.dropout import MIX1, MIX2, SHIFT, channel_keys, threshold
from dualtune.adapter.spec import LoraSpec, select_modules


class Noise:
    """The token keys of the running micro-batch, shared by all adapted layers. None: dropout is off."""

    noise_BT: mx.array | None = None


class Weights:
    """The adapter's two matrices. Not a Module: the model's parameters stay the base's, and these are bound to
    whatever the running function is differentiated by."""

    lora_A_rI: mx.array
    lora_B_Or: mx.array


class LoRALinear(nn.Module):
    """y = W x + b + scale · B (A x), with A and B in float32 and the products in the dtype of x.

    Hu et al., LoRA, arXiv 2106.09685. Dropout acts on the x that A sees, as in PEFT.
    """

    def __init__(self, base: nn.Module, module: str, spec: LoraSpec, noise: Noise) -> None:
        super().__init__()
        self.base = base
        self.weights = Weights()
        self.scale = spec.scale
        self.dropout = spec.dropout
        self.noise = noise
        self._keys_I = mx.array(channel_keys(module, linear_shape(base)[1]))  # a leading _ keeps it from the parameters

    def __call__(self, x_BTI: mx.array) -> mx.array:
        y_BTO = self.base(x_BTI)
        if self.noise.noise_BT is not None and self.dropout:
            x_BTI = self._dropped(x_BTI, self.noise.noise_BT)
        u_BTr = self.scale * (x_BTI @ self.weights.lora_A_rI.T.astype(x_BTI.dtype))
        return y_BTO + u_BTr @ self.weights.lora_B_Or.T.astype(x_BTI.dtype)

    def _dropped(self, x_BTI: mx.array, noise_BT: mx.array) -> mx.array:
        """`dualtune.adapter.dropout.keep_mask` on the device."""
        h_BTI = (noise_BT[..., None] ^ self._keys_I) * mx.array(MIX1, mx.uint32)
        h_BTI = (h_BTI ^ (h_BTI >> SHIFT)) * mx.array(MIX2, mx.uint32)
        keep_BTI = h_BTI.view(mx.int32) >= threshold(self.dropout)
        return x_BTI * keep_BTI / (1.0 - self.dropout)


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """(out, in) of a linear layer; a quantized one packs 32 / bits weights into a word."""
    out_dim, in_dim = layer.weight.shape
    return out_dim, in_dim * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else in_dim


def add_lora(model: nn.Module, spec: LoraSpec, noise: Noise) -> dict[str, LoRALinear]:
    """Wrap the targeted linear layers in place. Returns module path -> wrapper, sorted by path."""
    linear = {p: m for p, m in model.named_modules() if isinstance(m, (nn.Linear, nn.QuantizedLinear))}
    shapes = {path: linear_shape(layer) for path, layer in linear.items()}
    wrapped = {path: LoRALinear(linear[path], path, spec, noise) for path in select_modules(shapes, spec.targets)}
    model.update_modules(tree_unflatten(list(wrapped.items())))
    return wrapped
