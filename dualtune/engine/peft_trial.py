"""Whether PEFT loads an adapter of a base model: tried if it is installed, else judged by the names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

from dualtune.engine.card import cards
from dualtune.model.adapter import PREFIX, modules_of
from dualtune.model.config_file import read_config
from dualtune.model.embeddings import tied_head
from dualtune.model.formats.directory import Adapter, peft_layout
from dualtune.model.formats.naming import Naming
from dualtune.model.places import naming_of
from dualtune.model.targets import is_embedding
from dualtune.model.weight_files import has_weights

NO_MODEL = "any model of transformers"
# The names of Llama, which transformers and PEFT keep as they are. Nothing needs to be imported to know that.
_PLAIN = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)", re.ASCII)


def named(adapter: Adapter, directory: Path) -> Adapter:
    """Return an adapter with the naming of its base in a directory, and with notes on what PEFT does not load.

    PEFT renames some names of files itself and some not, so that a wrapper's are tried both ways.
    """
    naming = naming_of(directory, modules_of(adapter.tensors))
    if any(is_embedding(name.removeprefix(PREFIX)) for name in adapter.tensors):
        naming = replace(naming, tied_head=tied_head(directory))
    tried: list[Naming] = []
    for variant in (naming, replace(naming, peft=())) if naming.peft else (naming,):
        notes = peft_notes(replace(adapter, naming=variant), directory)
        tried.append(replace(variant, notes=notes))
        if not notes:
            break
    return replace(adapter, naming=min(tried, key=lambda naming: bool(naming.notes)))  # the first, if none is without


def peft_notes(adapter: Adapter, directory: Path) -> tuple[str, ...]:
    """Return what PEFT does not load of an adapter as it is written, or only into some models of transformers.

    Where it cannot be tried, these are the notes that the adapter has.
    """
    is_plain = (
        adapter.naming == Naming()
        and not adapter.spec.beside
        and all(map(_PLAIN.fullmatch, modules_of(adapter.tensors)))
    )
    if is_plain or not has_weights(directory):
        return ()
    problems = _problems(adapter, directory)
    if not problems:
        return adapter.naming.notes
    good = [name for name, why in problems.items() if not why]
    bad = [name for name, why in problems.items() if why]
    if not bad:
        return ()
    if good:
        only = f"PEFT loads it into the model of {' or '.join(good)}, not of {' or '.join(bad)}"
        return (f"{only}, where {problems[bad[0]]}",)
    return (f"PEFT cannot load it into {NO_MODEL}: {problems[bad[0]]}. For transformers, merge it",)


def _problems(adapter: Adapter, directory: Path) -> Mapping[str, str]:
    """Return what PEFT would do wrong in the model of each class, "" if nothing; empty if that cannot be tried here."""
    config = read_config(directory)
    if find_spec("peft") is None or "architectures" not in config:  # no class of transformers has saved the model
        return {}
    for card in cards():
        if card.peft_trial and card.package.is_installed:
            in_peft, tensors = peft_layout(replace(adapter, spec=replace(adapter.spec, alpha=1.0)))  # an integer
            shapes = {name: x.shape for name, x in tensors.items()}
            problems: dict[str, str] = resolve_name(card.peft_trial)(config, in_peft, shapes)
            return problems
    return {}
