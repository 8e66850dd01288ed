"""Where the matrix of a linear layer lies in the files of its base model, and what the layer is called after that.

The canonical name of an adapted layer is that of its tensor in the base's files: both backends read it there, however
their own classes name, transpose or split the layer. Other names are matched with the files by what they have in
common with them: the path from the stack of layers on, which no wrapper around a text model changes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from dualtune.base.errors import ConfigError, FormatError
from dualtune.model.adapter import PREFIX, is_of_base, owner_of
from dualtune.model.config_file import read_config
from dualtune.model.embeddings import tied_head
from dualtune.model.experts import ALL, DOWN, GATE, ROLES, UP, expert_of
from dualtune.model.formats.directory import Adapter
from dualtune.model.formats.naming import (
    PLAIN,
    ExpertNames,
    Naming,
    Prefixes,
    canonical_layer,
    canonical_parameter,
    rename_modules,
)
from dualtune.model.formats.stacks import in_form_of
from dualtune.model.targets import is_embedding, is_expert, is_head, is_in_router, is_text, matched, position_of
from dualtune.model.weight_files import has_weights, weights_in


class FilePlace(NamedTuple):
    """A matrix [out, in] in the files of a base model."""

    tensor: str
    transposed: bool = False  # the files have [in, out]
    rows: tuple[int, ...] | None = None  # of a larger matrix [out, in] that the tensor is, as a slice; None: all of it
    expert: int | None = None  # the tensor is a stack of such matrices, and this is the one of that number

    @property
    def module(self) -> str:
        """The canonical name of the layer. Parts of one matrix share a place's tensor, and need names of their own."""
        return canonical_layer(self.tensor.removesuffix(".weight"), None)[0]


def canonical_names(places: Mapping[str, FilePlace]) -> dict[str, str]:
    """Return the canonical name of each placed module of a backend's model, by its path there.

    A part of a fused matrix is called after the matrix and the last component of its own path.
    """
    return {
        path: place.module if place.rows is None else f"{place.module}.{path.rpartition('.')[2]}"
        for path, place in places.items()
    }


def expert_stack(places: Sequence[FilePlace], role: str) -> str:
    """Return the canonical name of the stack of a projection of all experts, from the places of its matrices.

    It has the names of the files where these hold experts one by one, else the projection's name beside the tensor,
    inside of `experts` where the files know none (Granite's `input_linear`).
    """
    first = places[0]
    if first.expert is None and (expert := expert_of(first.module)) is not None:
        return expert.stack
    container = first.tensor.removesuffix(".weight").rpartition(".")[0]
    return f"{container if is_expert(container) else f'{container}.experts'}.{ALL}.{role}"


def check_places(modules: Iterable[str], placed: Collection[str], library: str) -> None:
    """Raise ConfigError for an adapted module whose weight is not one matrix of the base's files: it could not move."""
    if unplaced := [module for module in modules if module not in placed]:
        raise ConfigError(
            f"adapter.targets: {library} computes the weight of {len(unplaced)} of the adapted modules from several "
            f"tensors of the model's files, or scales it (for example {unplaced[0]}), so no other program could load "
            "the adapter. Choose other targets, or the other backend"
        )


def file_names(modules: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Return the canonical name of each module, by the names that the base's files have for their layers."""
    layers = {canonical_layer(name, None)[0] for name in stored}
    others = {canonical_parameter(f"{name}.weight").removesuffix(".weight") for name in stored}
    return matched(modules, layers | others)


# ----------------------------------------------------------------------------------------------------------------------
# The names of the layers of a base model: what other tools call them, and an adapter in those of the base's files.

_EXPERT = re.compile(r"\.experts\.|\.(shared_experts?|switch_mlp)\.|\.router\.")
_STACK = re.compile(r"\.experts\.(gate_up_proj|up_proj|down_proj)(_blocks|\.weight)?$")
# mlx-lm's wrappers all call their text model so, and transformers' call it the other way round.
MLX_TEXT, PEFT_TEXT = "language_model.model.", "model.language_model."
# What mlx-lm calls the experts of a layer in these families; switch_mlp in all others. And families in whose parameters
# of transformers gate and up take turns (`is_concatenated` of `use_experts_implementation`).
MLX_EXPERTS = {
    "gpt_oss": "experts", "afmoe": "experts", "llama4": "experts", "llama4_text": "experts",
    "gemma4_text": "switch_glu",
}  # fmt: skip
INTERLEAVED = frozenset({"gpt_oss"})
# Families whose stacks transformers stores as [in, out], which PEFT 0.21 knows by an attribute that these lack.
TURNED = frozenset({"llama4", "llama4_text"})
# Families whose text part has experts beside those for images, and where transformers keeps the former.
WITHIN = {"ernie4_5_vl_moe": "text_moe"}
# Families whose routers hold their matrix in mlx-lm, instead of a linear layer that does.
MLX_ROUTERS = frozenset(
    {
        "bailing_moe_v3", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "dots1",
        "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "mimo_v2_flash", "muse_spark",
        "nemotron_h", "solar_open",
    }
)  # fmt: skip
# Families whose routers PEFT 0.21 does not rename as transformers does.
RENAMED_ROUTERS = frozenset({"granitemoe", "granitemoeshared", "granitemoehybrid", "phimoe"})
# `_check_lora_target_modules_mamba` of PEFT 0.21 refuses these layers in these families.
MAMBA_FAMILIES = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
MAMBA_LAYERS = frozenset({"out_proj", "conv1d"})


def naming_of(directory: Path, modules: Collection[str]) -> Naming:
    """Return how PEFT and mlx-lm name the adapted modules of a base, given by their canonical names.

    A base without weights, for a model that is initialized at random, says nothing.
    """
    if not has_weights(directory):
        return PLAIN
    config, stored = read_config(directory), list(weights_in(directory).tensors)
    family, nested = str(config.get("model_type")), config.get("text_config")
    routes = any(map(is_in_router, modules))
    # The first components that tell the towers of a model from its text part.
    others = (name.split(".") for name in stored if not is_text(name))
    towers = tuple(sorted({next(part for part in parts if not is_text(part)) for parts in others}))
    is_wrapper = bool(towers) or isinstance(nested, dict)
    # What the names of the adapted layers begin with, before their stack.
    stacks = Counter(position.stack for module in modules if (position := position_of(module)))
    head, dot, _ = stacks.most_common(1)[0][0].rpartition(".") if stacks else ("", "", "")
    beginning = head + dot
    notes: list[str] = []
    if is_wrapper:
        notes.append(
            "PEFT loads it into the model of AutoModelForImageTextToText, not always into that of AutoModelForCausalLM"
        )
    if family in MAMBA_FAMILIES and any(m.rpartition(".")[2] in MAMBA_LAYERS for m in modules):
        notes.append("PEFT 0.21 refuses adapters of out_proj in this family: for transformers, merge it")
    if routes and family in RENAMED_ROUTERS:
        notes.append("PEFT 0.21 does not find routers of this family: for transformers, merge it")
    peft: Prefixes = ()
    mlx: Prefixes = ()
    if is_wrapper:
        # PEFT renames the names of files itself, but not in families whose table stands under a class name. Those are
        # the ones whose files do not say that a model is a text model: Qwen2-VL's `model.layers.0`.
        if beginning == "model.":
            peft = ((beginning, PEFT_TEXT),)
        if stacks and beginning and beginning != MLX_TEXT:
            mlx = ((beginning, MLX_TEXT),)
        if "lm_head.weight" in stored:
            mlx = (*mlx, ("lm_head", "language_model.lm_head"))
    of_text = cast("dict[str, Any]", nested).get("model_type") if isinstance(nested, dict) else family
    own_router = routes and of_text in MLX_ROUTERS
    return Naming(
        peft, mlx, any(map(_EXPERT.search, stored)), towers, tuple(notes), experts=expert_names(config, stored),
        own_router=own_router,
    )  # fmt: skip


def expert_names(config: Mapping[str, Any], stored: Iterable[str]) -> ExpertNames:
    """Return what the files of a base call the projections of experts, and where other programs hold them."""
    family, idle, stored = str(config.get("model_type")), config.get("zero_expert_num"), list(stored)
    form = ExpertNames(
        interleaved=family in INTERLEAVED,
        mlx=MLX_EXPERTS.get(family, "switch_mlp"),
        turned=family in TURNED,
        idle=idle if family == "longcat_flash" and isinstance(idle, int) else 0,
        within=WITHIN.get(family, ""),
        stacked=any(map(_STACK.search, stored)),
    )
    names = {expert.name for name in stored if (expert := expert_of(name.removesuffix(".weight")))}
    roles = {ROLES[name]: name for name in names if name in ROLES}
    if not roles:  # there are none, or stacks of them, whose parts have the names of the roles
        return form
    return replace(form, gate=roles.get(GATE, ""), up=roles.get(UP, UP), down=roles.get(DOWN, DOWN))


def in_names_of(adapter: Adapter, directory: Path) -> Adapter:
    """Return an adapter with the names that the files of a base have for its modules.

    Other programs, and older versions of this one, have other names inside the wrapper around a text model. What
    matches nothing keeps its name, which the engine then refuses.
    """
    if not has_weights(directory):
        return adapter
    adapter = _with_ties(adapter, directory)
    modules = [*dict.fromkeys(filter(None, map(owner_of, adapter.tensors)))]
    tensors = weights_in(directory).tensors
    experts = expert_names(read_config(directory), tensors)
    if adapter.layout == "peft" and adapter.naming.experts == ExpertNames():
        own = in_form_of(adapter.tensors, experts)
        if own is not adapter.tensors:
            adapter = replace(adapter, tensors=own, naming=replace(adapter.naming, experts=experts))
    stored = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    names = file_names(modules, stored)
    if all(old == new for old, new in names.items()):
        return adapter
    return replace(
        adapter,
        tensors=rename_modules(adapter.tensors, names),
        spec=adapter.spec.renamed(names),
        naming=replace(naming_of(directory, names.values()), tied_head=adapter.naming.tied_head),
    )


def _with_ties(adapter: Adapter, directory: Path) -> Adapter:
    """Return an adapter of a base whose output head is its embedding with the numbers of both only once.

    PEFT copies each module of `modules_to_save`, so that two modules become of one: the same here only if they are
    equal. FormatError if they are not.
    """
    whole = {name.removeprefix(PREFIX): name for name in adapter.tensors if is_of_base(name)}
    embedding = next((name for bare, name in whole.items() if is_embedding(bare)), None)
    head = next((name for bare, name in whole.items() if is_head(bare)), None)
    if (embedding is None and head is None) or adapter.naming.tied_head or (tied := tied_head(directory)) is None:
        return adapter
    if embedding is None or head is None or not np.array_equal(adapter.tensors[embedding], adapter.tensors[head]):
        raise FormatError(
            f"the adapter was trained with an embedding and an output head of their own, but those of {directory} are "
            "one. Merge it with PEFT, and set tie_word_embeddings to false in the config.json of the result"
        )
    tensors = {name: x for name, x in adapter.tensors.items() if name != head}
    return replace(adapter, tensors=tensors, naming=replace(adapter.naming, tied_head=tied))
