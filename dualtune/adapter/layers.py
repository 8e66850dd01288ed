"""Module names in a stack of layers: `model.layers.3.self_attn.q_proj` is `self_attn.q_proj` of layer 3.

PEFT selects modules by the end of their paths, mlx-lm by names relative to a layer, which it looks for in every layer.
Both short forms are correct only if the adapter covers the whole stack; full paths are always correct.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from dualtune.adapter.spec import ALL_LINEAR, is_target

# The first number in the path is the layer; later numbers are experts.
_POSITION = re.compile(r"(?P<stack>.*?)\.(?P<layer>0|[1-9]\d{0,3})\.(?P<name>.+)", re.ASCII)
MAX_PATH = 512  # characters
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)


class LayerPosition(NamedTuple):
    stack: str  # model.layers
    layer: int  # 3
    name: str  # self_attn.q_proj


def is_module_path(text: str) -> bool:
    """Return whether the text is a dotted path: names from files get into terminals, reports and regexes."""
    return len(text) <= MAX_PATH and _PATH.fullmatch(text) is not None


def position_of(module: str) -> LayerPosition | None:
    """Return the module's position in a stack of layers; None outside of one, as for `lm_head`."""
    match = _POSITION.fullmatch(module)
    return LayerPosition(match["stack"], int(match["layer"]), match["name"]) if match else None


def within_stack(module: str) -> str:
    """Return the path from the stack of layers on, without what wraps it: `layers.3.self_attn.q_proj`."""
    position = position_of(module)
    if position is None:
        return module
    return f"{position.stack.rpartition('.')[2]}.{position.layer}.{position.name}"


def uniform_names(modules: Iterable[str]) -> set[str]:
    """Return the layer-relative names adapted in all layers from 0 to the last adapted one; none for two stacks."""
    positions = [position for module in modules if (position := position_of(module))]
    if len({position.stack for position in positions}) != 1:
        return set()
    layers: dict[str, set[int]] = defaultdict(set)
    for position in positions:
        layers[position.name].add(position.layer)
    num_layers = 1 + max(position.layer for position in positions)
    return {name for name, numbers in layers.items() if len(numbers) == num_layers}


def exact_targets(modules: Collection[str], targets: Iterable[str]) -> tuple[str, ...]:
    """Return the targets unchanged if they select exactly these modules, as far as can be known; else full paths."""
    given, uniform = tuple(targets), uniform_names(modules)
    if given == (ALL_LINEAR,):
        return short_targets(modules)

    def is_exact(module: str) -> bool:
        position = position_of(module)
        return module in given or (is_target(module, given) and (position is None or position.name in uniform))

    # A number as a name, such as that of the first layer of an MLP in a list, would also select a whole decoder layer.
    is_name = not any(target.isdigit() for target in given)
    selects_something = is_name and all(any(is_target(module, [target]) for module in modules) for target in given)
    return given if selects_something and all(map(is_exact, modules)) else tuple(sorted(modules))


def short_targets(modules: Collection[str]) -> tuple[str, ...]:
    """Return short names (`q_proj`, …) if the modules fill whole layers 0..max, else full paths."""
    positions = {module: position_of(module) for module in modules}
    uniform = uniform_names(modules)
    if any(position and position.name not in uniform for position in positions.values()):
        return tuple(sorted(modules))
    sharing: dict[str, set[str]] = defaultdict(set)  # q_proj -> {self_attn.q_proj}
    for name in uniform:
        sharing[name.rpartition(".")[2]].add(name)
    short = {
        name: last if len(names) == 1 and not last.isdigit() else name
        for last, names in sharing.items()
        for name in names
    }
    return tuple(sorted({short[position.name] if position else module for module, position in positions.items()}))
