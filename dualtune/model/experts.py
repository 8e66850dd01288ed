"""The experts of a mixture as linear layers: what they are called, and stacks of them.

The canonical adapter of an expert is that of a linear layer: `model.layers.0.mlp.experts.3.gate_proj` has A [rank, in]
and B [out, rank]. It holds exactly what every other form can: mlx-lm's stacks of one projection ([expert, rank, in]),
PEFT's adapters of a fused parameter, and the layers that vLLM reads. A form that fuses gate and up would have one A
for both, which two adapters that train apart are not.

Both backends compute with the stack of one projection of all experts, `model.layers.0.mlp.experts.*.gate_proj`: its
tensors have the expert as their first axis. Without NumPy at import time, like `dualtune.model.targets`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from dualtune.base.errors import ConfigError

ALL = "*"  # in the place of an expert's number: all of them
_NUMBERED = re.compile(
    rf"(?P<container>(?:.+\.)?(?!shared)(?:\w*_)?experts)\.(?P<number>0|[1-9]\d{{0,4}}|\{ALL})\.(?P<name>[\w.-]+)"
)
# What files call the projections of an expert, by what they are: Mixtral's w1, w3 and w2, and everyone else's.
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
ROLES = {GATE: GATE, UP: UP, DOWN: DOWN, "w1": GATE, "w3": UP, "w2": DOWN}
# Parts of a mixture that transformers names otherwise than the files: PEFT renames the tensors of an adapter, not its
# targets.
RENAMED = {"block_sparse_moe.experts": "mlp.experts", "block_sparse_moe.gate": "mlp.gate"}


class Expert(NamedTuple):
    """The place of a layer in a mixture."""

    container: str  # model.layers.0.mlp.experts
    number: str  # "3", or ALL
    name: str  # gate_proj

    @property
    def stack(self) -> str:
        """The path of this projection of all experts, in the names of tensors."""
        return f"{self.container}.{ALL}.{self.name}"

    @property
    def target(self) -> str:
        """The path of this projection of all experts, as a target."""
        return f"{self.container}.{self.name}"


def expert_of(module: str) -> Expert | None:
    """Return the place of a module, or of a tensor, in a mixture of experts; None outside of one."""
    match = _NUMBERED.fullmatch(module)
    return Expert(match["container"], match["number"], match["name"]) if match else None


def without_number(module: str) -> str:
    """Return the path without the number of an expert, by which a target selects all experts at once."""
    expert = expert_of(module)
    return expert.target if expert else module


def in_transformers(module: str) -> str:
    """Return what transformers calls the experts of a layer, or its router."""
    return next((module.removesuffix(old) + new for old, new in RENAMED.items() if module.endswith(f".{old}")), module)


def members(stack: str, count: int) -> list[str]:
    """Return the modules, or tensors, of a stack in the order of its first axis."""
    before, _, after = stack.partition(f".{ALL}.")
    return [f"{before}.{number}.{after}" for number in range(count)]


def stacks_of(modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules of each stack among these, by number. Other modules are left out."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if expert := expert_of(module):
            stacks[expert.stack].append(module)
    return {stack: sorted(numbered, key=_number) for stack, numbered in stacks.items()}


def _number(module: str) -> int:
    expert = expert_of(module)
    return int(expert.number) if expert else -1


class StackableLayer(Protocol):
    """An adapted layer of a backend."""

    @property
    def shape(self) -> tuple[int, int]: ...  # (out, in); of a stack, that of each expert

    @property
    def count(self) -> int | None: ...  # how many experts it is a stack of; None: it is one layer


Layer = TypeVar("Layer", bound=StackableLayer)


def shapes_of(layers: Mapping[str, StackableLayer]) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each adapted linear layer, those of experts one by one."""
    return {
        module: layer.shape
        for path, layer in layers.items()
        for module in (members(path, layer.count) if layer.count else [path])
    }


def layer_of(layers: Mapping[str, Layer], module: str) -> tuple[Layer, int | None]:
    """Return the layer of an adapted module; if that is a stack, also the number of the expert."""
    expert = expert_of(module)
    if expert is None or expert.stack not in layers:
        return layers[module], None
    return layers[expert.stack], int(expert.number)


def collapsed(modules: Iterable[str]) -> dict[str, str]:
    """Return for each module its path without the number of its expert; unchanged where some experts are missing."""
    names = {module: module for module in modules}
    stacks = stacks_of(names)
    count = max(map(len, stacks.values()), default=0)
    for stack, numbered in stacks.items():
        if numbered == members(stack, count):
            names |= dict.fromkeys(numbered, without_number(stack))
    return names


def check_whole(stack: str, chosen: Iterable[str], count: int) -> None:
    """Raise ConfigError if some of the experts of a stack are selected and others are not."""
    if missing := sorted({*members(stack, count)} - {*chosen}):
        raise ConfigError(
            f"adapter.targets: all {count} experts of {without_number(stack)} are adapted, or none: {missing[0]} is "
            "left out. Name the projection without the number of an expert"
        )


def check_stackable(method: str, stack: str, forms: Collection[tuple[int, float]]) -> None:
    """Raise ConfigError for a method that has no form for stacks of experts, or several ranks or alphas in one."""
    if len(forms) > 1:
        raise ConfigError(
            f"adapter.rank_pattern, adapter.alpha_pattern: got several values for the experts of "
            f"{without_number(stack)}, which are one stack. Name the projection without the number of an expert"
        )
    if method != "lora":
        raise ConfigError(
            f"adapter.method: got {method}, but {without_number(stack)} is a stack of experts, which lora alone "
            "adapts. Set adapter.method: lora, or adapter.experts: false"
        )


# --- shapes of tensors: of a stack, with the expert as the first axis, and of its experts -----------------------------


def shapes_apart(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes with those of stacks as one for each expert."""
    apart: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        apart |= dict.fromkeys(members(name, shape[0]), shape[1:]) if is_stack(name) else {name: shape}
    return apart


def gathered(shapes: Mapping[str, tuple[int, ...]], stacks: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors with those of the experts of these stacks as one, in the same order."""
    stacked: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        expert = expert_of(name)
        if expert is None or not any(f".{stack}." in f".{expert.stack}." for stack in stacks):
            stacked[name] = shape
        else:
            stacked[expert.stack] = (stacked[expert.stack][0] + 1 if expert.stack in stacked else 1, *shape)
    return stacked


def is_stack(name: str) -> bool:
    return f".{ALL}." in name
