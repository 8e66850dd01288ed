"""How PEFT and mlx-lm name the layers of a base model, where they do not name them as the base's files do.

Both wrap a text model differently when it has towers beside it, and PEFT has rules of its own for models with experts.
The base's files say what holds (`dualtune.base_model.names`); dualtune.json keeps it, so that an adapter is read back
without its base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from dualtune.adapter.layers import is_module_path
from dualtune.adapter.spec import PREFIX, Tensors, modules_of, parse_name
from dualtune.errors import FormatError
from dualtune.io import fields

Prefixes = tuple[tuple[str, str], ...]  # of canonical names -> of the tool's

# PEFT 0.21 takes linear layers with these names for experts wherever a model with experts has them, and drops their
# adapters: `_MOE_TARGET_MODULE_MAPPING` in peft/utils/transformers_weight_conversion.py. As parameters it keeps them.
EXPERT_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"})


@dataclass(frozen=True, slots=True)
class Naming:
    """The names that other tools give to the layers of a base model."""

    peft: Prefixes = ()
    mlx: Prefixes = ()
    has_experts: bool = False
    towers: tuple[str, ...] = ()  # components of the names of what is no part of the text model
    notes: tuple[str, ...] = ()  # what PEFT cannot load, or only in one way

    def as_json(self) -> dict[str, Any]:
        """Return what is kept in dualtune.json: the fields that say something."""
        return {name: value for name, value in asdict(self).items() if value}

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
        tuple(towers), tuple(fields.texts(table, "notes", where) or []),
    )  # fmt: skip


def renamed(names: Iterable[str], prefixes: Prefixes) -> dict[str, str]:
    """Return what each name becomes: the first prefix that it has is replaced."""
    found: dict[str, str] = {}
    for name in names:
        old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        found[name] = new + name.removeprefix(old) if old else name
    return found


def rename_tensors(tensors: Tensors, prefixes: Prefixes) -> Tensors:
    """Return canonical tensors with the prefixes of their modules replaced."""
    if not prefixes:
        return tensors
    return rename_modules(tensors, renamed(modules_of(tensors), prefixes))


def rename_modules(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Return canonical tensors with other names for their modules. FormatError if two would have the same one."""
    modules = {name: parsed[0] for name in tensors if (parsed := parse_name(name))}
    new = {
        f"{PREFIX}{names[modules[name]]}{name.removeprefix(PREFIX + modules[name])}" if name in modules else name: x
        for name, x in tensors.items()
    }
    if len(new) < len(tensors):
        twice = next(each for each, times in Counter(names.values()).items() if times > 1)
        raise FormatError(f"two layers of the adapter would be {twice}: it mixes the names of several programs")
    return new


def reversed_(prefixes: Prefixes) -> Prefixes:
    """Return the way back."""
    return tuple((new, old) for old, new in prefixes)


def _prefixes(table: Mapping[str, Any], key: str, where: object) -> Prefixes:
    value: Any = table.get(key, [])
    found: list[tuple[str, str]] = []
    for pair in cast("list[Any]", value if isinstance(value, list) else [value]):
        match pair:
            case [str(old), str(new)] if _is_beginning(old) and _is_beginning(new):
                found.append((old, new))
            case _:
                raise fields.wrong(where, f"naming.{key}", cast("object", pair), "pairs of beginnings of module names")
    return tuple(found)


def _is_beginning(text: str) -> bool:
    return is_module_path(text.removesuffix("."))
