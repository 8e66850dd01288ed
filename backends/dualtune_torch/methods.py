"""The adapted layer for each method of `dualtune.model.methods`: `LAYER` in the module of that name.

To add a method, add a file next to `lora.py` and its name under `adapter.method` in what the backend honours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from importlib import import_module
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.model.adapter import AdapterSpec
from dualtune.model.experts import ALL, check_stackable, check_whole, members, stacks_of
from dualtune_torch.routers import AdaptedRouter, routers
from dualtune_torch.weights.frozen import FrozenLinear, is_four_bit, is_linear, shape_of, stored_bytes, weight_of
from dualtune_torch.weights.stacks import PackedStack


class DropoutSeeds:
    """What adapted layers know of the current micro-batch: its dropout seeds, or None where dropout is off."""

    seeds_BT: Tensor | None = None
    is_evaluated: bool = False  # losses are computed, without gradients


class AdaptedLayer(nn.Module):
    """The replacement of a frozen linear layer. LAYER is called with (base, module path, spec, seeds)."""

    base: FrozenLinear
    grouped: bool = False  # whether `kernels.lora` may compute it
    start: tuple[Tensor, Tensor] | None = None  # A and B of a start that is kept beside what is trained, float32
    count: int | None = None  # how many experts it is a stack of; None: it is one layer
    reads_base: bool = False  # whether `read_base` does something
    moves: bool = False  # whether its frozen weight is there only while it computes, so that nothing as large may stay

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the frozen weight, or of that of each expert."""
        return shape_of(self.base)

    def frozen(self, number: int | None, dtype: torch.dtype) -> Tensor:
        """Return the frozen weight [out, in], of a stack that of one expert."""
        return weight_of(self.base, dtype)

    @property
    def is_four_bit(self) -> bool:
        """Whether the frozen weight is stored so."""
        return is_four_bit(self.base)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by part, in the shapes of the method."""
        raise NotImplementedError

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B, with a start that is kept."""
        A, B = self.trainable()["A"], self.trainable()["B"]
        return (A, B) if self.start is None else (torch.cat([A, self.start[0]], -2), torch.cat([B, self.start[1]], -1))

    def read_base(self) -> None:
        """Compute what it keeps of the frozen weight, whose numbers can be read now."""

    def refresh(self) -> None:
        """Drop what was computed from the trainable parameters: they have changed."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Compute at once what the first micro-batch of a step would, for a micro-step that is recorded without it."""

    def delta(self, number: int | None = None) -> Tensor:
        """ΔW, float32 [out, in], a tensor of its own; of a stack that of one expert."""
        raise NotImplementedError

    def storage(self) -> tuple[int, int]:
        """Return the number of frozen weights and their bytes in memory, scales included."""
        return math.prod(self.shape), stored_bytes(self.base)


def adaptable_layers(model: PreTrainedModel) -> dict[str, FrozenLinear]:
    """Return the linear layers of the text part and the routers by path, but none that shares its weight.

    An adapter on one side of such a pair could not be merged: an output head that is the embedding, for which MLX has
    no separate layer either, or a block that several layers share (Zamba).
    """
    pairs = chain.from_iterable(model.all_tied_weights_keys.items())
    tied = {name.removesuffix(".weight") for name in pairs}
    stacks = [module for module in model.modules() if isinstance(module, PackedStack)]
    of_experts = {id(layer) for stack in stacks for layer in stack.layers}
    layers = {p: m for p, m in model.named_modules() if id(m) not in of_experts and is_linear(m)} | routers(model)
    return {path: cast(FrozenLinear, layer) for path, layer in layers.items() if path not in tied}


def add_layers(
    model: PreTrainedModel, spec: AdapterSpec, seeds: DropoutSeeds, names: Mapping[str, str] | None = None
) -> dict[str, AdaptedLayer]:
    """Wrap the targeted layers in place. Returns canonical module path -> wrapper, sorted by path.

    `names`: the canonical name of each path that has one in the base's files. Layers of experts that are stacked have
    one wrapper for all experts, under the name of the stack.
    """
    layers, experts = import_module(f"dualtune_torch.{spec.layer}"), import_module("dualtune_torch.experts")
    of_experts = getattr(layers, "EXPERTS", experts.ExpertLoRA)
    known, linear = names or {}, adaptable_layers(model)
    paths = {known.get(path, path): path for path in linear}
    shapes = {name: shape_of(linear[path]) for name, path in paths.items()}
    stacked: Mapping[str, Any] = experts.projections(model) if spec.names_experts else {}
    of_stacks = {known.get(path, stack_path(path)): path for path in stacked}
    for name, path in of_stacks.items():
        shape: tuple[int, int] = stacked[path].shape
        shapes |= dict.fromkeys(members(name, stacked[path].count), shape)
    selected = spec.select(shapes)
    wrapped: dict[str, AdaptedLayer] = {
        name: layers.LAYER(linear[paths[name]], name, spec, seeds) for name in selected if name in paths
    }
    for name, layer in wrapped.items():
        is_router = not is_linear(linear[paths[name]])
        model.set_submodule(paths[name], AdaptedRouter(cast(Any, layer), name, spec) if is_router else layer)
    adapters = {}
    for stack, modules in stacks_of(name for name in selected if name not in paths).items():
        projection = stacked[of_stacks[stack]]
        check_whole(stack, modules, projection.count)
        check_stackable(spec.method, stack, {(spec.rank_of(m), spec.alpha_of(m)) for m in modules})
        adapters[of_stacks[stack]] = wrapped[stack] = of_experts(projection, stack, spec, seeds)
    experts.wrap(model, adapters, seeds)
    return dict(sorted(wrapped.items()))


def stack_path(path: str) -> str:
    """Return the name of the stack of a projection where the files give it none."""
    container, _, role = path.rpartition(".")
    return f"{container}.{ALL}.{role}"


def storage(layers: Collection[AdaptedLayer]) -> dict[str, int]:
    """Count the frozen weights of these layers and their bytes in memory, scales included."""
    stored = [layer.storage() for layer in layers]
    return {
        "layers": sum(layer.count or 1 for layer in layers),
        "four_bit": sum((layer.count or 1) * layer.is_four_bit for layer in layers),
        "parameters": sum(number for number, _ in stored),
        "bytes": sum(size for _, size in stored),
    }
