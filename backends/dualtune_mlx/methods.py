"""The layer that trains by a method of `dualtune.adapter.methods`: `LAYER` of the module of that name.

A new method is a file beside `lora.py` and its name under `adapter.method` in what the backend honours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from dualtune.adapter.dropout import input_of
from dualtune.adapter.formats.gpt2 import canonical_name
from dualtune.adapter.spec import LoraSpec, select_modules


class Noise:
    """The token keys of the running micro-batch, shared by all adapted layers. None: dropout is off."""

    noise_BT: mx.array | None = None


class AdaptedLayer(nn.Module):
    """What stands in the place of a frozen linear layer. LAYER is called with (base, module path, spec, noise, what an
    earlier layer that reads the same activations shares)."""

    base: nn.Module
    shared: Any  # what is shared with later ones

    def bind(self, values: Mapping[str, mx.array]) -> None:
        """Compute with these values of the trained parameters, by part."""
        raise NotImplementedError

    def delta(self) -> mx.array:
        """ΔW, float32 [out, in]."""
        raise NotImplementedError


def add_layers(model: nn.Module, spec: LoraSpec, noise: Noise, *, group: bool) -> dict[str, AdaptedLayer]:
    """Wrap the targeted linear layers in place. Returns canonical module path -> wrapper, sorted by path.

    `group`: layers that read the same activations share the product with their stacked A; else each has its own.
    """
    make = import_module(f"dualtune_mlx.{spec.method}").LAYER
    paths = {canonical_name(p): p for p, m in model.named_modules() if isinstance(m, (nn.Linear, nn.QuantizedLinear))}
    modules = dict(model.named_modules())
    linear = {name: modules[path] for name, path in paths.items()}
    shapes = {path: linear_shape(layer) for path, layer in linear.items()}
    shared: dict[tuple[str, int], Any] = {}
    wrapped: dict[str, AdaptedLayer] = {}
    for path, (_, in_dim) in select_modules(shapes, spec.targets).items():
        reads = (input_of(path), in_dim)
        wrapped[path] = make(linear[path], path, spec, noise, shared.get(reads) if group else None)
        shared[reads] = wrapped[path].shared
    model.update_modules(tree_unflatten([(paths[name], layer) for name, layer in wrapped.items()]))
    return wrapped


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """(out, in) of a linear layer; a quantized one packs 32 / bits weights into a word."""
    out_dim, in_dim = cast(mx.array, layer.weight).shape
    return out_dim, in_dim * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else in_dim


def weight_of(layer: nn.Module) -> mx.array:
    """The weight [out, in] of a linear layer, plain or quantized, in float32."""
    if isinstance(layer, nn.QuantizedLinear):
        return mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits).astype(mx.float32)
    return cast(mx.array, layer.weight).astype(mx.float32)


def storage(bases: Collection[nn.Module]) -> dict[str, int]:
    """How the frozen weights of these layers lie in memory: how many there are, and their bytes, scales included."""
    parts = ("weight", "scales", "biases")  # of a quantized layer; a plain one has the first alone
    return {
        "layers": len(bases),
        "four_bit": sum(isinstance(base, nn.QuantizedLinear) and base.bits == 4 for base in bases),
        "parameters": sum(out * in_ for out, in_ in map(linear_shape, bases)),
        "bytes": sum(base[part].nbytes for base in bases for part in parts if part in base),
    }
