"""What is trained beside the layers that a method adapts: parameters of the base itself, under their own names.

Whole modules, biases, or some rows of the embedding and of the output head. The state holds what these parameters are,
not what is added to them; a new adapter has those of the base. Names are PEFT's: `base_model.model.<module>.weight` for
a module of `modules_to_save`, and `base_model.model.<module>.token_adapter.trainable_tokens_delta`, of shape [rows,
width], for the rows of `trainable_token_indices`, in the order of the ids. A bias is `base_model.model.<module>.bias`.

An output head that is the embedding has no parameters of its own: training one of the two trains both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dualtune.base.errors import ConfigError
from dualtune.model.experts import in_transformers
from dualtune.model.targets import is_target

PREFIX = "base_model.model."
ROWS = "token_adapter.trainable_tokens_delta"
_ENDS = ("weight", "bias", ROWS)
Biases = Literal["none", "all", "lora_only"]  # PEFT's names: all of the model, or those of the adapted layers


@dataclass(frozen=True, slots=True)
class BesideAdapter:
    """What is trained beside an adapter. Modules are named by their path or its end, as `adapter.targets` are."""

    modules: tuple[str, ...] = ()  # all parameters of these
    rows: tuple[int, ...] = ()  # token ids
    # Whose rows; none are named: those of the embedding, and of the output head if it has parameters of its own.
    row_modules: tuple[str, ...] = ()
    bias: Biases = "none"

    def __bool__(self) -> bool:
        return bool(self.modules or self.rows or self.bias != "none")

    def renamed(self, names: Mapping[str, str]) -> BesideAdapter:
        """Return the same with other whole paths; the ends of paths stay."""
        modules, tables = (tuple(names.get(name, name) for name in part) for part in (self.modules, self.row_modules))
        return BesideAdapter(modules, self.rows, tables, self.bias)

    @property
    def keys(self) -> str:
        """The keys of the config that ask for it."""
        named = {
            "adapter.train_modules": self.modules,
            "adapter.train_rows": self.rows,
            "adapter.bias": self.bias != "none",
        }
        return " and ".join(key for key, value in named.items() if value)


NOTHING = BesideAdapter()


class NewToken(NamedTuple):
    """A token that a run adds to the tokenizer. It stands for exactly its text, and its rows are trained."""

    text: str
    special: bool = False  # a control token: it is left out where text is shown


class Table(NamedTuple):
    """The embedding or the output head of a model, by canonical path, and its number of rows."""

    module: str
    rows: int


def parameter_name(parameter: str) -> str:
    """Return the name of a parameter in a state, from its path in the base's files: `model.norm.weight`."""
    return PREFIX + parameter


def rows_name(module: str) -> str:
    """Return the name of the rows of a module in a state."""
    return f"{PREFIX}{module}.{ROWS}"


def parse_beside(name: str) -> tuple[str, str] | None:
    """Return (module path, "weight", "bias" or ROWS) of a name that may be of a parameter of the base; else None."""
    bare = name.removeprefix(PREFIX)
    end = next((end for end in _ENDS if bare.endswith(f".{end}")), None)
    is_ours = end is not None and bare != name and ".lora_" not in bare
    return (bare[: -len(end) - 1], end) if is_ours and end else None


def check_resident(beside: BesideAdapter) -> None:
    """Raise ConfigError if something is trained beside an adapter, for an engine that streams the base."""
    if beside:
        raise ConfigError(
            f"memory.resident_layers: only a frozen base can be streamed, but {beside.keys} trains parameters of it; "
            "allowed: all"
        )


def trained_parameters(beside: BesideAdapter, parameters: Iterable[str], adapted: Collection[str]) -> list[str]:
    """Return the parameters of the modules, of those of a model: canonical paths as `model.norm.weight`.

    `parameters`: with the corrections of the choice of experts, which some frameworks do not call parameters.
    ConfigError for a module that has none, for one that has what PEFT could not load, and for one of `adapted` inside.
    """
    own = list(parameters)
    chosen: dict[str, None] = {}
    for module in beside.modules:
        matches = [name for name in own if is_inside(name.rpartition(".")[0], module)]
        if not matches:
            names = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in own})
            raise ConfigError(
                f"adapter.train_modules: no module with plain parameters is called '{module}'; packed ones have none, "
                f"and rows of a packed embedding are trained by adapter.train_rows. This model has: {', '.join(names)}"
            )
        for name in matches:
            if problem := _in_peft(name):
                raise ConfigError(
                    f"adapter.train_modules: got '{module}', but {problem}, so that PEFT could not load what is "
                    "trained. adapter.targets may name routers instead"
                )
        if twice := next((path for path in adapted if is_inside(path, module)), None):
            raise ConfigError(
                f"adapter.train_modules: '{module}' is trained whole, but {twice} has an adapter. Take it out of "
                "adapter.targets, or out of adapter.train_modules"
            )
        chosen |= dict.fromkeys(matches)
    return sorted(chosen)


def trained_biases(beside: BesideAdapter, parameters: Iterable[str], adapted: Collection[str]) -> list[str]:
    """Return the biases that are trained, of the parameters of a model: canonical paths as `model.norm.bias`.

    Those of modules that are trained whole are left out. ConfigError if there are none.
    """
    if beside.bias == "none":
        return []
    biases = sorted(name for name in parameters if name.endswith(".bias"))
    if beside.bias == "lora_only":
        biases = [name for name in biases if name.removesuffix(".bias") in adapted]
    if not biases:
        whose = "this model has none" if beside.bias == "all" else "no adapted layer of this model has one"
        raise ConfigError(f"adapter.bias: got {beside.bias}, but {whose}. Set adapter.bias: none")
    return [name for name in biases if not any(is_inside(name.removesuffix(".bias"), m) for m in beside.modules)]


def shifts_choice(tensor: str) -> bool:
    """Return whether a tensor shifts the choice of experts alone: no loss has a slope for it."""
    return tensor.rpartition(".")[2] in ("e_score_correction_bias", "expert_bias")


# Parameters of mlx-lm that transformers has as buffers: factors of Gemma 4's layers, constants of Apertus' activation.
BUFFERS = (".layer_scalar", ".act_fn.beta", ".act_fn.eps")


def is_constant(tensor: str) -> bool:
    """Return whether a model that is trained whole keeps the numbers of a tensor."""
    return shifts_choice(tensor) or tensor.endswith(BUFFERS)


def _in_peft(parameter: str) -> str | None:
    """Return why PEFT could not load a module with this parameter that is trained whole; None if it can."""
    module = parameter.rpartition(".")[0]
    if shifts_choice(parameter):
        return f"{module} also holds a correction of its choice, which no gradient trains"
    other = in_transformers(module)
    return f"transformers calls {module} {other}" if other != module else None


def is_inside(path: str, module: str) -> bool:
    """Return whether a path is that of a named module, or of something inside of it."""
    parts = path.split(".")
    return any(is_target(".".join(parts[:end]), (module,)) for end in range(1, len(parts) + 1))


def trained_rows(beside: BesideAdapter, embedding: Table, head: Table | None, whole: Collection[str]) -> list[str]:
    """Return the modules whose rows are trained. `head`: None if it is the embedding. `whole`: modules trained whole.

    ConfigError for another module than these two, and for an id without a row.
    """
    if not beside.rows:
        return []
    tables = [embedding, *([head] if head else [])]
    chosen = [table for table in tables if not beside.row_modules or is_target(table.module, beside.row_modules)]
    for name in beside.row_modules:
        if not any(is_target(table.module, (name,)) for table in tables):
            allowed = " and ".join(table.module for table in tables)
            raise ConfigError(f"adapter.train_rows: got rows of '{name}', but only those of {allowed} can be trained")
    for module, rows in chosen:
        if beyond := [id for id in beside.rows if not 0 <= id < rows]:
            raise ConfigError(f"adapter.train_rows: got the token {beyond[0]}, but {module} has {rows} rows, from 0")
        if module in whole:
            raise ConfigError(
                f"adapter.train_rows: got rows of {module}, which adapter.train_modules trains whole. Remove one"
            )
    return [table.module for table in chosen]


def sizes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int] | None:
    """Return how many parameters of the base are in a state, by module; None if there are none."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        if place := parse_beside(name):
            sizes[place[0]] = sizes.get(place[0], 0) + math.prod(shape)
    return sizes or None


def whole_modules(places: Iterable[tuple[str, str]], bias: Biases) -> list[str]:
    """Return the modules that are trained whole, of the places of tensors: a bias alone is that of `bias`."""
    return sorted({module for module, end in places if end == "weight" or (end == "bias" and bias == "none")})


def beside_of(names: Iterable[str], spec: BesideAdapter) -> BesideAdapter:
    """Return what exactly the tensors of a state train, by whole paths. `spec`: the ids of its rows, and its biases."""
    places = [place for name in names if (place := parse_beside(name))]
    row_modules = tuple(sorted({module for module, end in places if end == ROWS}))
    rows = spec.rows if row_modules else ()
    return BesideAdapter(tuple(whole_modules(places, spec.bias)), rows, row_modules, spec.bias)
