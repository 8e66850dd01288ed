"""How PEFT and mlx-lm name the layers of a base model, where they do not name them as the base's files do.

Both wrap a text model differently when it has towers beside it, and PEFT has rules of its own for models with experts.
The base's files say what holds (`dualtune.model.places`); dualtune.json keeps it, so that an adapter is read back
without its base.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from dualtune.base import fields
from dualtune.base.errors import ConfigError, FormatError
from dualtune.model.adapter import PREFIX, Tensors, is_module_path, owner_of
from dualtune.model.experts import DOWN, GATE, UP, in_transformers

# ----------------------------------------------------------------------------------------------------------------------
# GPT-2's linear layers, which transformers and mlx-lm store and name differently.
#
# In transformers they are Conv1D with a weight [in, out], and PEFT sets `fan_in_fan_out` in an adapter for them; the
# matrices of the adapter itself have the usual orientation. mlx-lm transposes the weights, and names the stack
# `model.h` where transformers has `transformer.h`, which is the canonical name.

# By `model_type` of config.json. GPT-1 exists only in transformers.
FAMILIES = frozenset({"gpt2", "openai-gpt"})
_BIAS = ".bias"
STACK, MLX_STACK = "transformer.", "model."
_LAYER = r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)"
_BESIDE = re.compile(r"(transformer\.|model\.)?(?P<name>(wte|wpe|ln_f|h\.\d+\.ln_[12])\.(weight|bias))", re.ASCII)
_CANONICAL, _MLX, _BARE = (re.compile(re.escape(stack) + _LAYER, re.ASCII) for stack in (STACK, MLX_STACK, ""))


def is_fan_in_fan_out(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a model with Conv1D as linear layers."""
    return config.get("model_type") in FAMILIES


def has_gpt2_attention(shapes: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether the (out, in) of a layer are certainly GPT-2's.

    GPT-BigCode has plain linear layers with the same names, but shares one key and value among all heads.
    """
    return any(
        module.endswith(".attn.c_attn") and _CANONICAL.fullmatch(module) is not None and out_dim == 3 * in_dim
        for module, (out_dim, in_dim) in shapes.items()
    )


def is_mlx_name(module: str) -> bool:
    return _MLX.fullmatch(module) is not None


def canonical_name(module: str) -> str:
    """Return transformers' name of a layer that mlx-lm names differently; other names unchanged."""
    return STACK + module.removeprefix(MLX_STACK) if is_mlx_name(module) else module


def mlx_name(module: str) -> str:
    """Return mlx-lm's name of a GPT-2 layer; other names unchanged."""
    return MLX_STACK + module.removeprefix(STACK) if _CANONICAL.fullmatch(module) else module


def canonical_parameter(tensor: str) -> str:
    """Return the canonical name of a parameter of a weight file, such as a norm or a bias; not of a layer's weight."""
    if match := _BESIDE.fullmatch(tensor):
        return STACK + match["name"]
    if tensor.endswith(_BIAS):
        return canonical_layer(tensor.removesuffix(_BIAS), None)[0] + _BIAS
    return tensor


def canonical_layer(module: str, shape: tuple[int, int] | None) -> tuple[str, tuple[int, int] | None]:
    """Return the canonical name of a layer in a weight file, and the (out, in) of its weight of this shape.

    OpenAI's own files omit `transformer.`; in mlx-lm's files the weight is already transposed.
    """
    if _BARE.fullmatch(module) or _CANONICAL.fullmatch(module):
        return STACK + module.removeprefix(STACK), shape and (shape[1], shape[0])
    return canonical_name(module), shape


def stored_bias(name: str, tensors: Iterable[str]) -> str:
    """Return the tensor of the files that is the bias of an adapted layer. ConfigError if it is a part of one."""
    if tensor := next((tensor for tensor in tensors if canonical_parameter(tensor) == name), None):
        return tensor
    raise ConfigError(
        f"adapter.bias: the bias of {name.removesuffix(_BIAS)} is not in the model's files, so a merge could not "
        "hold it. Set adapter.bias: none"
    )


# ----------------------------------------------------------------------------------------------------------------------
Prefixes = tuple[tuple[str, str], ...]  # of canonical names -> of the tool's

MAX_IDLE = 99_999  # matrices that belong to no expert
# PEFT 0.21 takes linear layers with these names for experts wherever a model with experts has them, and drops their
# adapters: `_MOE_TARGET_MODULE_MAPPING` in peft/utils/transformers_weight_conversion.py. As parameters it keeps them.
EXPERT_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"})


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the projections of experts in a base's files, and what holds them elsewhere."""

    gate: str = GATE  # empty: the experts have no gate
    up: str = UP
    down: str = DOWN
    interleaved: bool = False  # whether gate and up take turns in transformers' parameter, else they are its halves
    mlx: str = "switch_mlp"  # what mlx-lm calls the experts of a layer
    turned: bool = False  # whether PEFT takes [in, out], as transformers stores the matrices, for [out, in]
    idle: int = 0  # matrices of transformers' gate and up, after those of experts, that belong to none
    within: str = ""  # what transformers has between a layer's mixture and its experts
    stacked: bool = False  # whether the base's files hold the experts of a layer in one tensor, too

    def as_json(self) -> dict[str, Any]:
        new = ("turned", "idle", "within", "stacked")
        return {name: value for name, value in asdict(self).items() if value or name not in new}

    def of(self, role: str) -> str:
        return {GATE: self.gate, UP: self.up, DOWN: self.down}[role]

    def in_transformers(self, container: str) -> str:
        """Return what transformers calls a mixture: it renames those whose files have w1, w2 and w3."""
        return self.in_peft(container) if self.gate == GATE else in_transformers(container)

    def in_peft(self, container: str) -> str:
        """Return the path of a mixture in the tensors of PEFT, which renames as transformers does but adds nothing."""
        return self.in_files(container).removesuffix("experts") + f"{self.within}.experts".removeprefix(".")

    def in_files(self, container: str) -> str:
        """Return the path of a mixture in the base's files."""
        inner = f".{self.within}.experts"
        return container.removesuffix(inner) + ".experts" if self.within and container.endswith(inner) else container


@dataclass(frozen=True, slots=True)
class Naming:
    """The names that other tools give to the layers of a base model."""

    peft: Prefixes = ()
    mlx: Prefixes = ()
    has_experts: bool = False
    towers: tuple[str, ...] = ()  # components of the names outside of the text model
    notes: tuple[str, ...] = ()  # what PEFT cannot load, or only in one way
    # The output head of a base that is trained as its embedding: PEFT's file has the numbers of both.
    tied_head: str | None = None
    experts: ExpertNames = ExpertNames()
    # Whether a router is adapted that has a class of its own in mlx-lm, whose trainer has no adapter for it.
    own_router: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the entry of dualtune.json: the fields with values."""
        values = {name: value for name, value in asdict(self).items() if value and name != "experts"}
        return values if self.experts == ExpertNames() else values | {"experts": self.experts.as_json()}

    def prefixes(self, layout: str) -> Prefixes:
        return self.mlx if layout == "mlx" else self.peft

    @property
    def exclusion(self) -> str | None:
        """The regular expression by which PEFT leaves the towers alone; None if there are none."""
        return rf"(.*\.)?({'|'.join(self.towers)})\..*" if self.towers else None


PLAIN = Naming()  # of a model whose layers all tools name as its files do


def read_naming(manifest: Mapping[str, Any], where: object) -> Naming:
    """Return the naming in dualtune.json, PLAIN if it has none. FormatError unless all of it are names."""
    table = fields.subtable(manifest, "naming", where)
    if not table:
        return PLAIN
    towers = fields.texts(table, "towers", where) or []
    for name in towers:
        if not is_module_path(name):
            raise fields.wrong(where, "naming.towers", name, "components of module names")
    return Naming(
        _prefixes(table, "peft", where), _prefixes(table, "mlx", where), table.get("has_experts") is True,
        tuple(towers), tuple(fields.texts(table, "notes", where) or []), fields.name(table, "tied_head", where),
        _expert_names(table, where), table.get("own_router") is True,
    )  # fmt: skip


def _expert_names(table: Mapping[str, Any], where: object) -> ExpertNames:
    names = fields.subtable(table, "experts", where)
    texts = {key: names[key] for key in ("gate", "up", "down", "mlx", "within") if key in names}
    for key, value in texts.items():
        if not isinstance(value, str) or not (is_module_path(value) or (key in ("gate", "within") and not value)):
            raise fields.wrong(where, f"naming.experts.{key}", value, "the name of a module")
    idle = names.get("idle", 0)
    if type(idle) is not int or not 0 <= idle <= MAX_IDLE:
        raise fields.wrong(where, "naming.experts.idle", idle, f"a number from 0 to {MAX_IDLE}")
    interleaved, turned, stacked = (names.get(key) is True for key in ("interleaved", "turned", "stacked"))
    return ExpertNames(**texts, interleaved=interleaved, turned=turned, idle=idle, stacked=stacked)


def renamed(names: Iterable[str], prefixes: Prefixes) -> dict[str, str]:
    """Return what each name becomes: the first prefix that it has is replaced."""
    names_by_old: dict[str, str] = {}
    for name in names:
        old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        names_by_old[name] = new + name.removeprefix(old) if old else name
    return names_by_old


def rename_tensors(tensors: Tensors, prefixes: Prefixes) -> Tensors:
    """Return canonical tensors with the prefixes of their modules replaced."""
    if not prefixes:
        return tensors
    return rename_modules(tensors, renamed(filter(None, map(owner_of, tensors)), prefixes))


def rename_modules(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Return canonical tensors with other names for their modules. FormatError if two would have the same one."""
    modules = {name: module for name in tensors if (module := owner_of(name)) and module in names}
    new = {
        f"{PREFIX}{names[modules[name]]}{name.removeprefix(PREFIX + modules[name])}" if name in modules else name: x
        for name, x in tensors.items()
    }
    if len(new) < len(tensors):
        twice = next(name for name, times in Counter(names.values()).items() if times > 1)
        raise FormatError(f"two layers of the adapter would be {twice}: it mixes the names of several programs")
    return new


def reversed_(prefixes: Prefixes) -> Prefixes:
    """Return the way back."""
    return tuple((new, old) for old, new in prefixes)


def _prefixes(table: Mapping[str, Any], key: str, where: object) -> Prefixes:
    value: Any = table.get(key, [])
    prefixes: list[tuple[str, str]] = []
    for pair in cast("list[Any]", value if isinstance(value, list) else [value]):
        match pair:
            case [str(old), str(new)] if _is_beginning(old) and _is_beginning(new):
                prefixes.append((old, new))
            case _:
                raise fields.wrong(where, f"naming.{key}", cast("object", pair), "pairs of beginnings of module names")
    return tuple(prefixes)


def _is_beginning(text: str) -> bool:
    return is_module_path(text.removesuffix("."))
