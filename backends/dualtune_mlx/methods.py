"""The adapted layer for each method of `dualtune.model.methods`: `LAYER` in the module of that name.

To add a method, add a file next to `lora.py` and its name under `adapter.method` in what the backend honours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from dualtune.model.adapter import AdapterSpec, rank_axis, tensor_name
from dualtune.model.dropout import input_of
from dualtune.model.experts import check_stackable, check_whole, members, stacks_of
from dualtune.model.formats.naming import canonical_name
from dualtune_mlx.adapter_inputs import Origins
from dualtune_mlx.beside import TrainedBeside
from dualtune_mlx.int8 import Int8Linear

LINEAR = (nn.Linear, nn.QuantizedLinear, Int8Linear)


class DropoutSeeds:
    """What adapted layers know of the current micro-batch: its dropout seeds, or None where dropout is off."""

    seeds_BT: mx.array | None = None
    is_evaluated: bool = False  # losses are computed, without gradients

    @contextmanager
    def after(self, slope: mx.array) -> Iterator[None]:
        """Compute masks again once this array is there. Without it, MLX would keep those that it has computed."""
        outer = self.seeds_BT
        try:
            if outer is not None:
                (self.seeds_BT,) = mx.depends([outer], [slope])
            yield
        finally:
            self.seeds_BT = outer


class AdaptedLayer(nn.Module):
    """The replacement of a frozen linear layer. LAYER is called with (base, module path, spec, seeds, what an earlier
    layer with the same input shares)."""

    base: nn.Module
    shared: Any  # what it shares with later layers
    count: int | None = None  # how many experts it is a stack of; None: it is one layer
    reads_base: bool = False  # whether `read_base` does something
    moves: bool = False  # whether its frozen weight is there only while it computes, so that nothing as large may stay

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the frozen weight, or of that of each expert."""
        return linear_shape(self.base)

    def frozen(self, number: int | None = None) -> mx.array:
        """Return the frozen weight [out, in], float32; of a stack that of one expert."""
        return weight_of(self.base)

    def storage(self) -> tuple[int, int]:
        """Return the number of frozen weights and their bytes in memory, scales included."""
        parts = ("weight", "scales", "biases")  # of a quantized layer; a plain one has only the first
        return math.prod(self.shape), sum(self.base[part].nbytes for part in parts if part in self.base)

    def read_base(self) -> None:
        """Compute what it keeps of the frozen weight, whose numbers can be read now."""

    def bind(self, values: Mapping[str, mx.array]) -> None:
        """Compute with these values of the trainable parameters, by part."""
        raise NotImplementedError

    def trace(self, origins: Origins) -> None:
        """Make inputs again in the backward pass, while their origins are kept."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the result for other layers with the same input. Needed only if one of them was not called."""
        raise NotImplementedError

    def delta(self, number: int | None = None) -> mx.array:
        """ΔW, float32 [out, in]; of a stack that of one expert."""
        raise NotImplementedError

    def derived(self, dtype: mx.Dtype) -> mx.array | None:
        """Return what it computes with that follows from the trainable parameters alone, if there is such an array."""
        return None

    def bind_derived(self, derived: mx.array) -> None:
        """Compute with this array in place of `derived`, which is computed once after each change of the parameters."""
        raise NotImplementedError


class Bound:
    """The arrays with which a model computes, by the name of what is trained."""

    bound: dict[str, mx.array]
    start: Mapping[str, mx.array]  # the frozen copy beside what is trained, by the same names: bound with it

    def bind(self, params: Mapping[str, mx.array]) -> None:
        """Compute with these arrays: those of all names, or of some."""
        raise NotImplementedError

    @contextmanager
    def binding(self, params: Mapping[str, mx.array]) -> Iterator[None]:
        """Compute with these arrays for a while."""
        outer = {name: self.bound[name] for name in params}
        self.bind(params)
        try:
            yield
        finally:
            self.bind(outer)


class AdaptedLayers(Bound):
    """The adapted layers of a model, what is trained beside them, and the arrays with which they compute, by name."""

    def __init__(
        self,
        layers: Mapping[str, AdaptedLayer],
        spec: AdapterSpec,
        dropout_seeds: DropoutSeeds,
        beside: TrainedBeside | None = None,
    ) -> None:
        self.layers = layers
        self._beside = beside.parts if beside else {}
        self.dropout_seeds = dropout_seeds
        self.bound, self.start = {}, {}
        parts, method = sorted(spec.method_spec.parts), spec.method
        self._names = {path: {part: tensor_name(path, part, method) for part in parts} for path in layers}

    def names_in(self, modules: Collection[nn.Module]) -> list[str]:
        """Return the names of the tensors of the layers that are among these modules or inside them."""
        inside = {id(part) for module in modules for part in module.modules()}
        names = [n for path, layer in self.layers.items() if id(layer) in inside for n in self._names[path].values()]
        return names + [n for n, part in self._beside.items() if any(id(module) in inside for module in part.modules)]

    def bind(self, params: Mapping[str, mx.array]) -> None:
        """Compute with these arrays: the tensors of all layers, or of some."""
        self.bound |= params
        for path, names in self._names.items():
            if params.keys() >= {*names.values()}:
                self.layers[path].bind({part: self._with_start(name, params[name]) for part, name in names.items()})
        for name in self._beside.keys() & params.keys():
            self._beside[name].bind(params[name])

    def _with_start(self, name: str, trained: mx.array) -> mx.array:
        if name not in self.start:
            return trained
        return mx.concatenate([trained, self.start[name].astype(trained.dtype)], cast(int, rank_axis(name)))

    def trace(self, origins: Origins) -> None:
        """Make the inputs of all layers again in the backward pass, while their origins are kept."""
        for layer in self.layers.values():
            layer.trace(origins)

    def forget(self) -> None:
        """Drop what layers keep for each other."""
        for layer in self.layers.values():
            layer.forget()


def linear_layers(model: nn.Module) -> list[str]:
    """Return the paths of all linear layers."""
    return [path for path, module in model.named_modules() if isinstance(module, LINEAR)]


def adaptable_layers(model: nn.Module) -> list[str]:
    """Return the paths of all linear layers, and of the routers that hold a matrix."""
    return [*linear_layers(model), *import_module("dualtune_mlx.routers").routers(model)]


def add_layers(
    model: nn.Module, spec: AdapterSpec, seeds: DropoutSeeds, *, group: bool, names: Mapping[str, str] | None = None
) -> dict[str, AdaptedLayer]:
    """Wrap the targeted linear layers in place. Returns canonical module path -> wrapper, sorted by path.

    `names`: the canonical name of each path that has one in the base's files. Layers of experts that are stacked have
    one wrapper for all experts, under the name of the stack.

    With `group`, layers that read the same activations share the product with their stacked A; else each has a
    separate product.
    """
    layers, experts = import_module(f"dualtune_mlx.{spec.layer}"), import_module("dualtune_mlx.experts")
    of_experts = getattr(layers, "EXPERTS", experts.ExpertLoRA)
    canonical = names or {}
    paths = {canonical.get(path, canonical_name(path)): path for path in adaptable_layers(model)}
    modules = dict(model.named_modules())
    linear = {name: modules[path] for name, path in paths.items()}
    shapes = {path: linear_shape(layer) for path, layer in linear.items()}
    stacked: Mapping[str, Any] = experts.projections(model) if spec.names_experts else {}
    of_stacks: dict[str, str] = {canonical.get(path) or experts.stack_path(path): path for path in stacked}
    for name, path in of_stacks.items():
        shape: tuple[int, int] = experts.shape_of(stacked[path])
        shapes |= dict.fromkeys(members(name, stacked[path].num_experts), shape)
    selected = spec.select(shapes)
    shared: dict[tuple[str, int], Any] = {}
    wrapped: dict[str, AdaptedLayer] = {}
    for path, (_, in_dim) in selected.items():
        if path not in linear:
            continue
        reads = (input_of(path), in_dim)
        if not isinstance(linear[path], LINEAR):
            wrapped[path] = import_module("dualtune_mlx.routers").AdaptedRouter(linear[path], path, spec)
            continue
        wrapped[path] = layers.LAYER(linear[path], path, spec, seeds, shared.get(reads) if group else None)
        shared[reads] = wrapped[path].shared
    adapters: dict[str, Any] = {}
    for stack, numbered in stacks_of(name for name in selected if name not in linear).items():
        base = stacked[of_stacks[stack]]
        check_whole(stack, numbered, base.num_experts)
        check_stackable(spec.method, stack, {(spec.rank_of(m), spec.alpha_of(m)) for m in numbered})
        adapters[of_stacks[stack]] = wrapped[stack] = of_experts(base, stack, spec, seeds)
    if spec.dropout:
        experts.tell_routing(model, adapters)
    places = paths | of_stacks
    model.update_modules(tree_unflatten([(places[name], layer) for name, layer in wrapped.items()]))
    return dict(sorted(wrapped.items()))


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """Return (out, in) of a linear layer. A quantized one packs 32 / bits weights into a word."""
    out_dim, in_dim = cast(mx.array, layer.weight).shape
    return out_dim, in_dim * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else in_dim


def weight_of(layer: nn.Module) -> mx.array:
    """Return the weight [out, in] of a linear layer, plain or quantized, in float32."""
    if isinstance(layer, nn.QuantizedLinear):
        how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        return mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how).astype(mx.float32)
    if isinstance(layer, Int8Linear):
        return layer.unpacked(mx.float32)
    return cast(mx.array, layer.weight).astype(mx.float32)


def times_weight(x: mx.array, layer: nn.Module) -> mx.array:
    """Return x Wᵀ without the layer's bias. A packed weight is multiplied as it is stored."""
    if isinstance(layer, nn.QuantizedLinear):
        how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        return mx.quantized_matmul(x, layer.weight, layer.scales, layer.get("biases"), transpose=True, **how)
    if isinstance(layer, Int8Linear):
        return layer.product(x)
    return x @ cast(mx.array, layer.weight).T


def storage(layers: Collection[AdaptedLayer]) -> dict[str, int]:
    """Count the frozen weights of these layers and their bytes in memory, scales included."""
    stored = [layer.storage() for layer in layers]
    return {
        "layers": sum(layer.count or 1 for layer in layers),
        "four_bit": sum((layer.count or 1) * (getattr(layer.base, "bits", None) == 4) for layer in layers),
        "parameters": sum(number for number, _ in stored),
        "bytes": sum(size for _, size in stored),
    }
