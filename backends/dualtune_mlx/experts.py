"""LoRA of the experts of a mixture on MLX: a wrapper around mlx-lm's layer of one projection of all experts.

mlx-lm sorts the tokens of a large batch by expert, and multiplies each by the weights of its own (`SwitchLinear`, plain
or quantized, in `mlx_lm.models.switch_layers`). The wrapper does the same with A and B, so that its cost follows the
experts that are active.

Legend: S pairs of a token and one of its experts, E experts, I input and O output features of a projection, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from dualtune.model.adapter import AdapterSpec, within_stack
from dualtune.model.config_file import read_config
from dualtune.model.dropout import MIX1, MIX2, SHIFT, channel_keys, check_tokens, threshold
from dualtune.model.experts import ALL, DOWN, GATE, ROLES, UP, Expert, members
from dualtune.model.places import INTERLEAVED, FilePlace
from dualtune.model.targets import is_text
from dualtune.model.weight_files import BaseWeights
from dualtune_mlx.adapter_inputs import Origins
from dualtune_mlx.methods import AdaptedLayer, DropoutSeeds

SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
# mlx-lm's names of the projections, by what they are: those of experts without a gate are numbered.
NAMES = {GATE: GATE, UP: UP, DOWN: DOWN, "fc1": UP, "fc2": DOWN}
# Tensors of files with stacks of gate and up together, or of down; and what they are in Granite's.
FUSED, STACKED_DOWN = "gate_up_proj", "down_proj"
GRANITE = {FUSED: "input_linear.weight", STACKED_DOWN: "output_linear.weight"}


class StackedFactors:
    """The adapter's two stacks. Not a Module, so that the model's parameters are only the base's."""

    lora_A_ErI: mx.array
    lora_B_EOr: mx.array


class ExpertLoRA(AdaptedLayer):
    """y = W x + b + scale · B (A x), each row by the matrices of its expert, with A and B in float32."""

    def __init__(self, base: nn.Module, stack: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        super().__init__()
        self.base = base
        self.count = int(cast(Any, base).num_experts)
        self.scale = spec.scale_of(members(stack, 1)[0])
        self.dropout, self.dropout_seeds = spec.dropout, seeds
        self.weights = StackedFactors()
        self.routing: list[mx.array] = []  # of the current call: the experts of each token, while there is dropout
        self._keys_I = mx.array(channel_keys(stack, shape_of(base)[1]))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.base(x, indices, sorted_indices=sorted_indices)
        if self.drops:
            x = self.dropped(x, sorted_indices)
        return y + self.change(x, indices, sorted_indices)

    def change(self, x: mx.array, indices: mx.array, is_sorted: bool) -> mx.array:
        """Return scale · B (A x)."""
        for factor in (self.weights.lora_A_ErI, self.weights.lora_B_EOr):
            factor = factor.astype(x.dtype).swapaxes(-1, -2)
            x = mx.gather_mm(x, factor, rhs_indices=indices, sorted_indices=is_sorted)
        return self.scale * x

    @property
    def drops(self) -> bool:
        """Whether the current micro-batch has dropout."""
        return self.dropout_seeds.seeds_BT is not None and self.dropout > 0

    def dropped(self, x: mx.array, is_sorted: bool) -> mx.array:
        """`dualtune.model.dropout.keep_mask` on the device, by the token of each row."""
        (chosen,), seeds_BT = self.routing, cast(mx.array, self.dropout_seeds.seeds_BT)
        *tokens, each = chosen.shape
        check_tokens(math.prod(tokens), seeds_BT.size)
        if is_sorted:  # as mlx-lm's `_gather_sort` does it
            seeds = seeds_BT.flatten()[mx.argsort(chosen.flatten()) // each][:, None, None]
        else:
            seeds = seeds_BT.reshape(*tokens, 1, 1, 1)
        h = (seeds ^ self._keys_I) * mx.array(MIX1, mx.uint32)
        h = (h ^ (h >> SHIFT)) * mx.array(MIX2, mx.uint32)
        return x * (h.view(mx.int32) >= threshold(self.dropout)) * (1.0 / (1.0 - self.dropout))

    def bind(self, values: Mapping[str, mx.array]) -> None:
        self.weights.lora_A_ErI, self.weights.lora_B_EOr = values["A"], values["B"]

    def trace(self, origins: Origins) -> None:
        """Inputs of experts are kept: they are rows in another order."""

    def forget(self) -> None:
        self.routing.clear()

    @property
    def shape(self) -> tuple[int, int]:
        return shape_of(self.base)

    def frozen(self, number: int | None = None) -> mx.array:
        assert number is not None
        return weight_of(self.base, number)

    def storage(self) -> tuple[int, int]:
        parts = (self.base.get(part) for part in ("weight", "scales", "biases"))
        return cast(int, self.count) * math.prod(self.shape), sum(part.nbytes for part in parts if part is not None)

    def delta(self, number: int | None = None) -> mx.array:
        assert number is not None
        return self.scale * (self.weights.lora_B_EOr[number] @ self.weights.lora_A_ErI[number])


def shape_of(base: nn.Module) -> tuple[int, int]:
    """Return (out, in) of each expert's matrix."""
    return cast(Any, base).output_dims, cast(Any, base).input_dims


def weight_of(base: nn.Module, number: int) -> mx.array:
    """Return the frozen weight [out, in] of one expert, float32."""
    weight = cast(mx.array, base.weight)[number]
    if not isinstance(base, QuantizedSwitchLinear):
        return weight.astype(mx.float32)
    biases = base.get("biases")
    how = {"group_size": base.group_size, "bits": base.bits, "mode": base.mode}
    unpacked = mx.dequantize(weight, base.scales[number], None if biases is None else biases[number], **how)
    return unpacked.astype(mx.float32)


# --- finding and wrapping ---------------------------------------------------------------------------------------------


def projections(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of stacked experts by path. Routed layers of another kind are none."""
    return {
        path: m for path, m in model.named_modules() if isinstance(m, SWITCHES) and path.rpartition(".")[2] in NAMES
    }


def stack_path(path: str) -> str:
    """Return the name of the stack of a layer where the files give it none."""
    container, _, name = path.rpartition(".")
    return Expert(f"{container.rpartition('.')[0]}.experts", ALL, NAMES[name]).stack


def role_of(path: str) -> str:
    return NAMES[path.rpartition(".")[2]]


def tell_routing(model: nn.Module, adapters: Mapping[str, ExpertLoRA]) -> None:
    """Let mixtures tell their adapters which experts each token goes to: dropout depends on the token."""
    modules = dict(model.named_modules())
    for path, adapter in adapters.items():
        mixture: Any = modules[path.rpartition(".")[0]]
        if not getattr(type(mixture), "tells", False):
            mixture.__class__ = _telling(type(mixture))
            mixture.told = []
        mixture.told.append(adapter.routing)


@cache
def _telling(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        for routing in self.told:
            routing[:] = [indices]
        try:
            return kind.__call__(self, x, indices)  # pyright: ignore[reportCallIssue]
        finally:
            for routing in self.told:
                routing.clear()

    return type(kind.__name__, (kind,), {"__call__": call, "tells": True, "__module__": kind.__module__})


def expert_places(model: nn.Module, base: BaseWeights) -> dict[str, list[FilePlace]]:
    """Return where the matrix of each expert lies, by the paths of `projections`.

    Files hold them one by one; or as stacks, of gate and up together or, from mlx-lm, of each projection. mlx-lm's
    classes join the first without a change of the numbers. A layer that is found in none of these ways has no places.
    """
    stored = {within_stack(name): name for name in base.tensors if is_text(name)}
    interleaved = read_config(base.directory).get("model_type") in INTERLEAVED
    places: dict[str, list[FilePlace]] = {}
    for path, module in projections(model).items():
        container, shape, role = within_stack(path.rpartition(".")[0]), shape_of(module), role_of(path)
        parent, count = container.rpartition(".")[0], cast(Any, module).num_experts
        for name in (name for name, its in ROLES.items() if its == role):
            single = [stored.get(n) for n in members(f"{parent}.experts.{ALL}.{name}.weight", count)]
            names = [name for name in single if name is not None]
            if len(names) == count and all(base.tensors[n].shape == shape for n in names):
                places[path] = [FilePlace(name) for name in names]
        if path in places:
            continue
        if (own := stored.get(f"{within_stack(path)}.weight")) is not None:
            places[path] = [FilePlace(own, expert=number) for number in range(count)]
        elif place := _in_stack(base, stored, parent, role, shape, interleaved=interleaved):
            places[path] = [place._replace(expert=number) for number in range(count)]
    return places


def _in_stack(
    base: BaseWeights,
    stored: Mapping[str, str],
    parent: str,
    role: str,
    shape: tuple[int, int],
    *,
    interleaved: bool,
) -> FilePlace | None:
    """Return the place of one expert's matrix in a stack of transformers' form; None if there is none."""
    parameter, (out, in_) = STACKED_DOWN if role == DOWN else FUSED, shape
    names = [f"{parent}.experts.{parameter}{end}" for end in ("", ".weight", "_blocks")]
    name = next((stored[n] for n in (*names, f"{parent}.{GRANITE[parameter]}") if n in stored), None)
    if name is None:
        return None
    rows = None
    if parameter == FUSED:
        second = int(role == UP)
        rows = (second, 2 * out, 2) if interleaved else (second * out, (second + 1) * out)
        out *= 2
    # Where both orders fit, the stacks whose gate and up take turns are those with the input first (gpt-oss).
    tensor = base.tensors[name].shape[1:]
    transposed = tensor == (in_, out) and (interleaved or tensor != (out, in_))
    return FilePlace(name, transposed, rows) if transposed or tensor == (out, in_) or len(tensor) != 2 else None
