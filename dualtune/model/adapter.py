"""What an adapter is: its hyperparameters, the names and shapes of its tensors, and their initial values.

The core, both backends and checkpoints all use PEFT's form: for a linear layer with LoRA, `y = W x + scale · B (A x)`,
the dictionary holds `base_model.model.<module>.lora_A.weight` with shape [rank, in] and `….lora_B.weight` with shape
[out, rank], both float32. The method decides which tensors a layer has (`dualtune.model.methods`).

Reading an adapter needs only NumPy, neither torch nor MLX.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.model.beside import NOTHING, PREFIX, BesideAdapter, parse_beside
from dualtune.model.experts import collapsed, without_number
from dualtune.model.merge_rounding import MergeFor
from dualtune.model.methods import FULL, INITS, KEPT_INITS, METHODS
from dualtune.model.methods.method import Method
from dualtune.model.stochastic_rounding import MasterWeights
from dualtune.model.targets import (
    ALL_LAYERS,
    ALL_LINEAR,
    Pattern,
    Shapes,
    Value,
    check_pattern,
    is_expert,
    is_target,
    position_of,
    select_modules,
    value_of,
    with_effect,
)

Tensors = dict[str, np.ndarray]

Scaling = Literal["standard", "rank_stabilized"]

_PARTS = {parameter.peft: parameter.part for method in METHODS.values() for parameter in method.parameters}
_NAME = re.compile(rf"^base_model\.model\.(?P<module>.+)\.(?P<end>{'|'.join(map(re.escape, _PARTS))})$")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The hyperparameters of an adapter. `targets` are module names: a path, or the end of one (`q_proj`)."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    scaling: Scaling = "standard"
    method: str = "lora"  # one of `dualtune.model.methods.NAMES`
    init: str = INITS[0]  # of a fresh adapter; says nothing of one that was trained, and is in no file
    layers: str = ALL_LAYERS  # of those that the targets name: see `dualtune.model.targets.layer_numbers`
    rank_pattern: Pattern[int] = ()  # of the modules whose rank or alpha is another one
    alpha_pattern: Pattern[float] = ()
    beside: BesideAdapter = NOTHING  # parameters of the base that are trained too
    experts: bool = False  # whether the targets name layers of experts too
    merge_for: MergeFor = "none"  # the format in which training sees the merge; in no file
    master_weights: MasterWeights = "float32"  # the dtype in which a model that is trained whole is kept; in no file

    @property
    def scale(self) -> float:
        """The factor of B A in a module that no pattern names."""
        return self.alpha / divisor(self.rank, self.scaling)

    def rank_of(self, module: str) -> int:
        return value_of(module, self.rank_pattern, self.rank)

    def alpha_of(self, module: str) -> float:
        return value_of(module, self.alpha_pattern, self.alpha)

    def scale_of(self, module: str) -> float:
        """The factor of B A in a module."""
        return self.alpha_of(module) / divisor(self.rank_of(module), self.scaling)

    def differences(self) -> dict[str, str]:
        """Return what is another rank or alpha, by target, for display."""
        ranks = {target: f"rank {rank}" for target, rank in self.rank_pattern}
        alphas = {target: f"alpha {alpha:g}" for target, alpha in self.alpha_pattern}
        return {t: " and ".join(filter(None, (ranks.get(t), alphas.get(t)))) for t in (*ranks, *alphas)}

    def select(self, available: Shapes) -> dict[str, tuple[int, int]]:
        """Return the adapted layers of a model, sorted. ConfigError if a target or a pattern selects nothing."""
        modules = select_modules(available, self.targets, self.layers, experts=self.experts)
        check_pattern("rank_pattern", self.rank_pattern, modules)
        check_pattern("alpha_pattern", self.alpha_pattern, modules)
        return modules

    def renamed(self, names: Mapping[str, str]) -> AdapterSpec:
        """Return the spec with other whole paths; what is the end of a path stays."""
        names = {without_number(old): without_number(new) for old, new in names.items()} | {**names}
        return replace(
            self,
            targets=tuple(names.get(target, target) for target in self.targets),
            rank_pattern=tuple((names.get(target, target), rank) for target, rank in self.rank_pattern),
            alpha_pattern=tuple((names.get(target, target), alpha) for target, alpha in self.alpha_pattern),
            beside=self.beside.renamed(names),
        )

    @property
    def names_experts(self) -> bool:
        """Whether layers of experts are adapted."""
        return self.experts or any(map(is_expert, self.targets))

    @property
    def keeps_start(self) -> bool:
        """Whether the start stays beside what is trained, which then has half of the rank in the files."""
        return self.init in KEPT_INITS and not self.trains_model

    def width_of(self, module: str) -> int:
        """The rank of a module's matrices in a state: of what is trained, and of a frozen start."""
        return self.rank_of(module) * (2 if self.keeps_start else 1)

    @property
    def plain(self) -> AdapterSpec:
        """The spec of the files: of twice the rank if the start is kept. Its start is one that is not."""
        if not self.keeps_start:
            return self
        factor = divisor(2 * self.rank, self.scaling) / divisor(self.rank, self.scaling)
        return replace(
            self, rank=2 * self.rank, alpha=factor * self.alpha, init=INITS[0],
            rank_pattern=tuple((target, 2 * rank) for target, rank in self.rank_pattern),
            alpha_pattern=tuple((target, factor * alpha) for target, alpha in self.alpha_pattern),
        )  # fmt: skip

    def split(self, state: Tensors) -> tuple[Tensors, Tensors]:
        """Return (what is trained, the kept start) of a state, by the same names. Without a start the latter is empty.

        What is trained has its own half of the rank: the first rows of A and columns of B.
        """
        axes = {name: axis for name in state if self.keeps_start and (axis := rank_axis(name))}
        halves = {name: np.split(state[name], 2, axis) for name, axis in axes.items()}
        return {**state, **{name: both[0] for name, both in halves.items()}}, {n: both[1] for n, both in halves.items()}

    def joined(self, trained: Tensors, start: Tensors) -> Tensors:
        """Return the state of what `split` returns."""
        wide = {name: np.concatenate([trained[name], kept], rank_axis(name)) for name, kept in start.items()}
        return {**trained, **wide}

    def state_shapes(self, trained: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a state whose trained part has these."""
        return scaled_ranks(trained, 2, 1) if self.keeps_start else dict(trained)

    @property
    def trains_model(self) -> bool:
        """Whether the parameters of the model itself are trained. Nothing else in the spec has a meaning then."""
        return self.method == FULL

    @property
    def trains_base(self) -> bool:
        """Whether parameters of the model itself are trained, some or all: no other engine may share its base then."""
        return self.trains_model or bool(self.beside)

    @property
    def method_spec(self) -> Method:
        return METHODS[self.method]

    @property
    def layer(self) -> str:
        """The name of the module of a backend that has the adapted layer."""
        return self.method if self.merge_for == "none" else "merged"

    def check_masters(self, dtype: str) -> None:
        """Raise ConfigError if a model that computes in this dtype cannot be trained in that of the spec."""
        if self.master_weights not in ("float32", dtype):
            raise ConfigError(
                f"adapter.master_weights: got {self.master_weights}, but the model computes in {dtype}. Set "
                f"model.dtype: {self.master_weights}, or adapter.master_weights: float32"
            )

    def check_router(self, module: str) -> None:
        """Raise ConfigError for what cannot be trained of a router that multiplies by its weight itself."""
        for key, got, allowed, reason in (
            ("method", self.method, "lora", "only lora's update is added to a weight"),
            ("merge_for", self.merge_for, "none", "exports do not round all routers alike"),
            ("dropout", f"{self.dropout:g}", "0", "the input of its adapter is not there alone"),
        ):
            if got != allowed:
                others = f"take {module.rpartition('.')[2]} out of adapter.targets"
                raise ConfigError(
                    f"adapter.{key}: got {got}, but {module} is a router, which multiplies by its weight itself: "
                    f"{reason}. Set adapter.{key}: {allowed}, or {others}"
                )

    def initial(self, shapes: Shapes, seed: int, weight: Callable[[str], np.ndarray] | None = None) -> Tensors:
        """Return a fresh adapter of this spec: see `init_adapter`. That of `plain` is another one, made at once."""
        return init_adapter(
            shapes, self.rank_of, seed, method=self.method, init=self.init, scale=self.scale_of, weight=weight
        )


def divisor(rank: int, scaling: Scaling) -> float:
    """Return the divisor of alpha in the scale: the rank, or its square root (rsLoRA, arXiv 2312.03732)."""
    return math.sqrt(rank) if scaling == "rank_stabilized" else rank


def tensor_name(module: str, part: str, method: str = "lora") -> str:
    """Return the canonical name, which is PEFT's, for a part ("A", "B", …) of a module path."""
    return next(f"{PREFIX}{module}.{p.peft}" for p in METHODS[method].parameters if p.part == part)


def parse_name(name: str) -> tuple[str, str] | None:
    """Return (module path, part) of a canonical name; None if no method has such a name."""
    match = _NAME.match(name)
    return (match["module"], _PARTS[match["end"]]) if match else None


def rank_axis(name: str) -> int | None:
    """Return which axis of a tensor is the rank, from the end, so that a stack of experts has the same; None: none."""
    parsed = parse_name(name)
    return {"A": -2, "B": -1}.get(parsed[1]) if parsed else None


def scaled_ranks(shapes: Mapping[str, tuple[int, ...]], times: int, over: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes with every rank multiplied by times / over."""
    scaled = {name: [*shape] for name, shape in shapes.items()}
    for name, shape in scaled.items():
        if axis := rank_axis(name):
            shape[axis] = shape[axis] * times // over
    return {name: tuple(shape) for name, shape in scaled.items()}


def owner_of(name: str) -> str | None:
    """Return the module path of any canonical name: of an adapted layer, or of a parameter of the base."""
    parsed = parse_name(name) or parse_beside(name)
    return parsed[0] if parsed else None


def is_of_base(name: str) -> bool:
    """Return whether a canonical name is that of a parameter of the base, which is trained beside adapted layers."""
    return parse_name(name) is None and parse_beside(name) is not None


def modules_of(tensors: Iterable[str]) -> list[str]:
    """Return the sorted paths of the adapted modules in the tensor names."""
    return sorted({parsed[0] for name in tensors if (parsed := parse_name(name))})


def init_adapter(
    shapes: Shapes,
    rank: int | Callable[[str], int],
    seed: int,
    *,
    method: str = "lora",
    init: str = INITS[0],
    scale: Callable[[str], float] = lambda module: 1.0,
    weight: Callable[[str], np.ndarray] | None = None,
) -> Tensors:
    """Return a fresh adapter, which changes nothing yet: the method's initial values for each module.

    `rank`: of all modules, or of each.
    `weight` returns the frozen weight [out, in] of a module, float32; without it, tensors that depend on it are
    omitted. Every module has a separate random stream, keyed by (seed, module path), so that the numbers depend neither
    on the other adapted modules nor on their order in a backend.
    """
    tensors: Tensors = {}
    for module, shape in shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(module.encode())])
        frozen = partial(weight, module) if weight else None
        own_rank = rank if isinstance(rank, int) else rank(module)
        if init in KEPT_INITS and own_rank > min(shape):
            raise ConfigError(
                f"adapter.init: got {init}, which takes {own_rank} directions out of the weight of {module}, but it is "
                f"{list(shape)}. Set adapter.rank_pattern for this layer to at most {min(shape)}, or adapter.init: "
                f"{INITS[0]}"
            )
        values = METHODS[method].inits[init](shape, own_rank, scale(module), rng, frozen)
        tensors |= {tensor_name(module, part, method): value for part, value in values.items()}
    return tensors


# ----------------------------------------------------------------------------------------------------------------------
# Module names in a stack of layers: `model.layers.3.self_attn.q_proj` is `self_attn.q_proj` of layer 3.
#
# PEFT selects modules by the end of their paths, mlx-lm by names relative to a layer, in every layer. Both short
# forms are correct only if the adapter covers the whole stack; full paths are always correct.

MAX_PATH = 512  # characters
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)


def is_module_path(text: str) -> bool:
    """Return whether the text is a dotted path: names from files get into terminals, reports and regexes."""
    return len(text) <= MAX_PATH and _PATH.fullmatch(text) is not None


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
    """Return the targets unchanged if they select exactly these modules, as far as can be known; else full paths.

    Those of experts are without the number of the expert.
    """
    modules = {*collapsed(modules).values()}
    names, uniform = tuple(targets), uniform_names(modules)
    if ALL_LINEAR in names:
        return short_targets(modules)

    def is_exact(module: str) -> bool:
        position = position_of(module)
        return module in names or (is_target(module, names) and (position is None or position.name in uniform))

    # A number as a name, such as that of the first layer of an MLP in a list, would also select a whole decoder layer.
    is_name = not any(target.isdigit() for target in names)
    selects_something = is_name and all(any(is_target(module, [target]) for module in modules) for target in names)
    return names if selects_something and all(map(is_exact, modules)) else tuple(sorted(modules))


def pattern_of(
    values: Mapping[str, Value],
    default: Value,
    first: Pattern[Value] = (),
    read: Callable[[str, Pattern[Value], Value], Value] = value_of,
) -> Pattern[Value]:
    """Return a pattern that gives these modules these values, as `read` reads it.

    That is the given one without what has no effect, if it does; else one of short names where all modules of a name
    share a value, and of whole paths.
    """
    by_name: dict[str, set[Value]] = defaultdict(set)
    for module, value in values.items():
        by_name[module.rpartition(".")[2]].add(value)
    shared = {name for name, found in by_name.items() if len(found) == 1 and not name.isdigit()}
    others = [(module, value) for module, value in sorted(values.items()) if value != default]
    short = dict.fromkeys(
        (name if (name := module.rpartition(".")[2]) in shared else module, value) for module, value in others
    )
    # The last one is right even where one path is the end of another.
    for pattern in (with_effect(first, values), tuple(short), tuple(others)):
        if all(read(module, pattern, default) == value for module, value in values.items()):
            return pattern
    return tuple(sorted(values.items(), key=lambda item: (-len(item[0]), item[0])))


def short_targets(modules: Collection[str]) -> tuple[str, ...]:
    """Return short names (`q_proj`, …) if the modules fill whole layers 0..max, else full paths.

    Those of experts are without the number of the expert.
    """
    modules = {*collapsed(modules).values()}
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
