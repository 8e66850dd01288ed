"""The adapted layer for each method of `dualtune.model.methods`: `LAYER` in the module of that name.

To add a method, add a file next to `lora.py` and its name under `adapter.method` in what the backend honours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from importlib import import_module
from itertools import chain

from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.model.adapter import AdapterSpec
from dualtune_torch.weights.frozen import FrozenLinear, is_four_bit, is_linear, shape_of, stored_bytes


class DropoutSeeds:
    """The dropout seeds of the current micro-batch, shared by all adapted layers. None: dropout is off."""

    seeds_BT: Tensor | None = None


class AdaptedLayer(nn.Module):
    """The replacement of a frozen linear layer. LAYER is called with (base, module path, spec, seeds)."""

    base: FrozenLinear
    grouped: bool = False  # whether `kernels.lora` may compute it

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by part, in the shapes of the method."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Drop what was computed from the trainable parameters: they have changed."""

    def delta(self) -> Tensor:
        """ΔW, float32 [out, in], a tensor of its own."""
        raise NotImplementedError


def linear_layers(model: PreTrainedModel) -> dict[str, FrozenLinear]:
    """Return the linear layers of the text part by path, but none that shares its weight with another module.

    An adapter on one side of such a pair could not be merged: an output head that is the embedding, for which MLX has
    no separate layer either, or a block that several layers share (Zamba).
    """
    pairs = chain.from_iterable(model.all_tied_weights_keys.items())
    tied = {name.removesuffix(".weight") for name in pairs}
    return {path: layer for path, layer in model.named_modules() if is_linear(layer) and path not in tied}


def add_layers(
    model: PreTrainedModel, spec: AdapterSpec, seeds: DropoutSeeds, names: Mapping[str, str] | None = None
) -> dict[str, AdaptedLayer]:
    """Wrap the targeted linear layers in place. Returns canonical module path -> wrapper, sorted by path.

    `names`: the canonical name of each path that has one in the base's files.
    """
    make = import_module(f"dualtune_torch.{spec.layer}").LAYER
    linear = linear_layers(model)
    paths = {(names or {}).get(path, path): path for path in linear}
    shapes = {name: shape_of(linear[path]) for name, path in paths.items()}
    wrapped = {name: make(linear[paths[name]], name, spec, seeds) for name in spec.select(shapes)}
    for name, layer in wrapped.items():
        model.set_submodule(paths[name], layer)
    return wrapped


def storage(bases: Collection[FrozenLinear]) -> dict[str, int]:
    """Count the frozen weights of these layers and their bytes in memory, scales included."""
    return {
        "layers": len(bases),
        "four_bit": sum(map(is_four_bit, bases)),
        "parameters": sum(math.prod(shape_of(base)) for base in bases),
        "bytes": sum(map(stored_bytes, bases)),
    }
