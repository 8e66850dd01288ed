"""Selection of a model's linear layers by a list of targets. Without NumPy, so that a memory estimate starts fast."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple, TypeVar

from dualtune.base.errors import ConfigError
from dualtune.model.experts import ROLES, expert_of, without_number

Shapes = Mapping[str, tuple[int, int]]  # module path -> (out, in) of its weight
Value = TypeVar("Value", int, float)
Pattern = tuple[tuple[str, Value], ...]  # (target, value of the modules that it selects); the first that selects counts

ALL_LINEAR = "all-linear"
OUTPUT_HEAD = "lm_head"
# The default of adapter.targets. A family that lacks one of them is adapted as by all-linear.
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

ALL_LAYERS = "all"
LAYERS = r"all|(first|last) [1-9]\d{0,3}|\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*"  # the values of adapter.layers

# The first number in the path is the layer; later numbers are experts.
_POSITION = re.compile(r"(?P<stack>.*?)\.(?P<layer>0|[1-9]\d{0,3})\.(?P<name>.+)", re.ASCII)
# Components of a module's path. An expert is one of many alternatives (shared experts are not), a router chooses.
_EXPERT = re.compile(r"(?!shared)(\w*_)?experts|switch_(mlp|glu)")
_ROUTER = re.compile(r"gate|(\w+_)?router")
# What files call the output head, outside of the stack of layers. embed_out: GPT-NeoX, unembed: Inkling.
_HEADS = frozenset({OUTPUT_HEAD, "embed_out", "unembed"})
# Keys and values from a latent state (DeepSeek): mlx-lm splits this matrix by heads and has no layer for it.
_LATENT = "kv_b_proj"
# What files of some families call the feed-forward block where it is a mixture.
_MIXTURES = frozenset({"block_sparse_moe"})
# Components of a name that only say what a text model is part of.
_WRAPPERS = frozenset({"model", "language_model", "text_model", "llm", "transformer", "backbone", "thinker"})
# A part of a model that is not its text model.
_OTHER_PART = re.compile(r"vision|visual|audio|image|video|speech|vit\b|multi_modal|projector|talker|code2wav")


_EMBEDDING_WEIGHT = re.compile(r"(.+\.)?(embed_tokens|wte|embed_in|(word|tok)_embeddings)\.weight")
_HEAD_WEIGHT = re.compile(r"(.+\.)?(lm_head|embed_out)\.weight")


class LayerPosition(NamedTuple):
    stack: str  # model.layers
    layer: int  # 3
    name: str  # self_attn.q_proj


def position_of(module: str) -> LayerPosition | None:
    """Return the module's position in a stack of layers; None outside of one, as for `lm_head`."""
    match = _POSITION.fullmatch(module)
    return LayerPosition(match["stack"], int(match["layer"]), match["name"]) if match else None


def is_text(name: str) -> bool:
    """Return whether a tensor or module belongs to the text part of a model, not to a tower beside it."""
    return _OTHER_PART.search(name) is None


def is_target(module: str, targets: Iterable[str]) -> bool:
    """Match a list of names as in PEFT: the whole path, or its last components."""
    return any(module == target or module.endswith("." + target) for target in targets)


def bare_name(module: str) -> str:
    """Return the path of a module without the components that only wrap a text model.

    A layer of an expert has its role there, which programs do not call alike, and not what holds the experts.
    """
    if (expert := expert_of(module)) and (position := position_of(module)):
        role = ROLES.get(expert.name, expert.name)
        return f"{bare_name(position.stack)}.{position.layer}.experts.{expert.number}.{role}"
    parts = ["mlp" if part in _MIXTURES else part for part in module.split(".")]
    first = next((i for i, part in enumerate(parts) if part not in _WRAPPERS), len(parts) - 1)
    return ".".join(parts[first:])


def matched(modules: Iterable[str], allowed: Collection[str]) -> dict[str, str]:
    """Return the name of each module among the known ones, which may have another wrapper around the text model.

    A known name is kept. Another one becomes that of the only known layer of the text part with the same path inside
    its wrapper; a module that matches none, or several, keeps its name.
    """
    bare: Mapping[str, list[str]] = defaultdict(list)
    for name in allowed:
        if is_text(name):
            bare[bare_name(name)].append(name)
    names: dict[str, str] = {}
    for module in modules:
        matches = [module] if module in allowed else bare.get(bare_name(module), [])
        names[module] = matches[0] if len(matches) == 1 else module
    return names


def lacks(available: Iterable[str], targets: Iterable[str], *, experts: bool = False) -> list[str]:
    """Return which of the default targets a model lacks, if these are the targets: then all-linear replaces them."""
    modules, names = list(available), tuple(targets)
    if {*names} != {*DEFAULT_TARGETS}:
        return []
    return [target for target in names if not any(_selects(target, module, experts) for module in modules)]


def layer_numbers(layers: str, available: Iterable[str]) -> frozenset[int] | None:
    """Return the numbers of the decoder layers that adapter.layers names, of a model with these modules; None for all.

    `first 8`, `last 8`, or numbers from 0 and ranges, both ends included: `0,4-11`. ConfigError for a layer that the
    model does not have.
    """
    if layers == ALL_LAYERS:
        return None
    numbers = {position.layer for module in available if is_text(module) and (position := position_of(module))}
    count = max(numbers, default=-1) + 1
    word, _, size = layers.partition(" ")
    if size:
        ranges = [range(int(size)) if word == "first" else range(count - int(size), count)]
    else:
        ends = [part.partition("-") for part in layers.split(",")]
        ranges = [range(int(first), int(last or first) + 1) for first, _, last in ends]
    if not all(numbers and numbers[0] >= 0 and numbers[-1] < count for numbers in ranges):
        raise ConfigError(
            f"adapter.layers: got {layers}, but the model has {count} layers: allowed are the numbers 0 to "
            f"{count - 1}, and ranges of them from low to high, or first and last with at most {count}"
        )
    return frozenset(chain.from_iterable(ranges))


def select_modules(
    available: Shapes, targets: Iterable[str], layers: str = ALL_LAYERS, *, experts: bool = False
) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a model that the targets select in these layers, in sorted order.

    "all-linear" means all linear layers of the text part except the output head, as in PEFT, and except experts,
    routers and what one backend has no layer for: these are selected only by name. It replaces the default targets
    where a model lacks one of them. With `experts`, names and all-linear select the layers of experts too; a target
    without the number of an expert selects that layer of all of them.
    What is in no layer, such as an output head, is selected by name in spite of `layers`.
    ConfigError, with the names in the model, if a target selects nothing.
    """
    chosen, numbers = tuple(targets), layer_numbers(layers, available)
    if lacks(available, chosen, experts=experts):
        chosen = (ALL_LINEAR,)
    # Each target has to select something: a misspelt one would silently train less.
    selected: dict[str, tuple[int, int]] = {}
    for target in chosen:
        matches = [module for module in available if _selects(target, module, experts)]
        if not matches:
            names = sorted({module.split(".")[-1] for module in available})
            if target == ALL_LINEAR:
                raise ConfigError(
                    "adapter.targets: the text part of this model has no linear layer that this backend adapts: its "
                    "layers are of kinds of their own. All that there is, output heads, experts, routers and other "
                    f"parts, is adapted only if it is named: {', '.join(names) or 'none'}. Take the other backend"
                )
            raise ConfigError(
                f"adapter.targets: no linear layer is called '{target}'. This model has: {', '.join(names) or 'none'}. "
                f"Use --set adapter.targets={ALL_LINEAR}, or names: --set 'adapter.targets=[{', '.join(names[:2])}]'"
            )
        inside = [module for module in matches if _is_inside(module, numbers, by_name=target != ALL_LINEAR)]
        if not inside:
            raise ConfigError(f"adapter.layers: got {layers}, but none of these layers has '{target}'")
        selected |= {module: available[module] for module in inside}
    if experts and not any(map(is_expert, selected)):
        raise ConfigError(
            "adapter.experts: got true, but the targets select no layer of an expert: this model has none, or none of "
            f"the names {', '.join(chosen)}. Set adapter.experts: false, or adapter.targets: {ALL_LINEAR}"
        )
    return dict(sorted(selected.items()))


def value_of(module: str, pattern: Pattern[Value], default: Value) -> Value:
    """Return the value of a module: that of the first target of the pattern that selects it, else the default."""
    return next((value for target, value in pattern if _selects(target, module, experts=True)), default)


def check_pattern(key: str, pattern: Pattern[Value], adapted: Iterable[str]) -> None:
    """Raise ConfigError for a target of adapter.<key> that selects no adapted layer, or only those of earlier ones."""
    modules = list(adapted)
    for target, _ in set(pattern) - set(with_effect(pattern, modules)):
        if any(_selects(target, module, experts=True) for module in modules):
            raise ConfigError(
                f"adapter.{key}: '{target}' has no effect: the first name that selects a layer counts, and those "
                "before it select the same ones. Put it before them"
            )
        names = ", ".join(sorted({module.split(".")[-1] for module in modules}))
        raise ConfigError(
            f"adapter.{key}: no adapted layer is called '{target}'. The adapter has: {names or 'none'}. A name may "
            "begin with a part of its path, such as layers.0.self_attn.q_proj"
        )


def with_effect(pattern: Pattern[Value], modules: Iterable[str]) -> Pattern[Value]:
    """Return the pattern without targets that select none of these modules, or only those of earlier ones."""
    left, kept = set(modules), dict[str, Value]()
    for target, value in pattern:
        if matches := {module for module in left if _selects(target, module, experts=True)}:
            kept[target] = value
            left -= matches
    return tuple(kept.items())


def _is_inside(module: str, numbers: frozenset[int] | None, *, by_name: bool) -> bool:
    position = position_of(module)
    return numbers is None or (by_name if position is None else position.layer in numbers)


def adapted_as(available: Iterable[str], targets: Iterable[str], *, experts: bool = False) -> str | None:
    """Return one sentence if all-linear replaces the default targets, else None."""
    missing = lacks(available, targets, experts=experts)
    if not missing:
        return None
    others = "routers" if experts else "experts and routers"
    return f"all linear layers but {others}: the model has no {', '.join(missing)}"


def _selects(target: str, module: str, experts: bool = False) -> bool:
    parts = module.split(".")
    if target == ALL_LINEAR:
        is_head = parts[-1] in _HEADS and not any(part.isdigit() for part in parts)
        is_other = is_head or parts[-1] == _LATENT or (is_expert(module) and not experts) or is_in_router(module)
        return not is_other and is_text(module)
    if target in (module, without_number(module)):
        return True
    if not (is_target(module, (target,)) or is_target(without_number(module), (target,))):
        return False
    # A tower and an expert have layers called q_proj and gate_proj too: a component of their own names them.
    return (is_text(module) or not is_text(target)) and (experts or not is_expert(module) or is_expert(target))


def is_expert(path: str) -> bool:
    """Return whether a module, or a target, is one of many alternatives: shared experts are not."""
    return any(_EXPERT.fullmatch(part) for part in path.split("."))


def is_router(module: str) -> bool:
    """Return whether a module has the name of what chooses the experts of a token."""
    return _ROUTER.fullmatch(module.rpartition(".")[2]) is not None


def is_in_router(path: str) -> bool:
    """Return whether a module is a router, or inside of one."""
    return any(_ROUTER.fullmatch(part) for part in path.split("."))


def is_embedding(name: str) -> bool:
    """Return whether a tensor is an embedding of tokens, by its name."""
    return _EMBEDDING_WEIGHT.fullmatch(name) is not None


def is_head(name: str) -> bool:
    """Return whether a tensor is an output head, by its name."""
    return _HEAD_WEIGHT.fullmatch(name) is not None
