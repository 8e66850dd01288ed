"""The adapters of the Tinker API: which layers a client's settings name, in a model of any family."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dualtune.base.errors import ConfigError, FormatError
from dualtune.config.schema import AdapterConfig
from dualtune.model.adapter import AdapterSpec
from dualtune.model.embeddings import tied_head
from dualtune.model.experts import DOWN, GATE, UP, expert_of, without_number
from dualtune.model.methods import INITS, KEPT_INITS
from dualtune.model.targets import (
    ALL_LINEAR,
    is_embedding,
    is_expert,
    is_head,
    is_in_router,
    is_text,
    position_of,
)
from dualtune.model.weight_files import weights_in
from dualtune.train.prepare import spec_of_section
from dualtune.use.tinker.messages import LoraSettings

ALPHA = 32.0  # as in Tinker, for every rank
MOST_RANK = 512
_ATTENTION = re.compile(r"\w*attn\w*|\w*attention\w*|\w*mixer\w*|mamba\w*|ssm\w*|conv\w*")


def spec_of(settings: LoraSettings, model_dir: Path) -> AdapterSpec:
    """Return the adapter that these settings ask for. ConfigError if they name nothing, or too high a rank.

    An output head that is the embedding has no adapter.
    """
    if not 1 <= settings.rank <= MOST_RANK:
        raise ConfigError(f"lora_config: rank: got {settings.rank}, allowed: 1 to {MOST_RANK}")
    tensors = weights_in(model_dir).tensors
    head = next((name.removesuffix(".weight") for name in tensors if is_head(name)), None)
    targets = [head] if settings.train_unembed and head is not None and tied_head(model_dir) is None else []
    has_experts = settings.train_mlp and any(map(is_expert, tensors))
    if settings.train_attn and settings.train_mlp:
        targets = [ALL_LINEAR, *targets]
    elif settings.train_attn or settings.train_mlp:
        modules = [name.removesuffix(".weight") for name, x in tensors.items() if _is_linear(name, len(x.shape))]
        chosen = [module for module in modules if _is_attention(module) == settings.train_attn]
        if has_experts and not any(map(expert_of, chosen)):  # the files hold them as stacks
            targets = [*(f"experts.{name}" for name in (GATE, UP, DOWN)), *targets]
        # A name within its layer selects it in all layers, and nothing of the other part.
        targets = [*sorted({p.name for p in map(position_of, map(without_number, chosen)) if p}), *targets]
    if not targets:
        raise ConfigError(
            "lora_config: train_attn, train_mlp and train_unembed leave nothing to train in this model. An output head "
            "that is the embedding has no adapter: set train_attn or train_mlp"
        )
    return AdapterSpec(settings.rank, ALPHA, 0.0, tuple(targets), experts=has_experts)


def section_of(spec: AdapterSpec) -> dict[str, Any]:
    """Return an adapter as the section of a config."""
    return {
        "rank": spec.rank, "alpha": spec.alpha, "scaling": spec.scaling, "dropout": 0.0, "targets": [*spec.targets],
        "layers": spec.layers, "experts": spec.experts, "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": dict(spec.alpha_pattern),
    }  # fmt: skip


def spec_in(section: Mapping[str, Any], where: str) -> AdapterSpec:
    """Return the adapter of a section of a config, without dropout. ConfigError unless it is LoRA and nothing else."""
    try:
        adapter = AdapterConfig.model_validate(section)
    except ValidationError as error:
        raise FormatError(f"{where}: adapter: {error.errors()[0]['msg']}. It was changed afterwards") from None
    plain = AdapterConfig()
    for key in ("method", "bias", "train_modules", "train_rows", "merge_for"):
        if (value := getattr(adapter, key)) != getattr(plain, key):
            shown = value if isinstance(value, str) else ", ".join(map(str, value))
            raise ConfigError(
                f"path: {where} has adapter.{key}: {shown}, and served is LoRA alone. Go on with `dualtune train`"
            )
    if adapter.init in KEPT_INITS:
        rule = "whose start is kept beside the adapter. Go on with `dualtune train`"
        raise ConfigError(f"path: {where} has adapter.init: {adapter.init}, {rule}")
    targets = (adapter.targets,) if isinstance(adapter.targets, str) else adapter.targets
    # Runs that share an engine have the same spec, whatever their weights started from.
    return replace(spec_of_section(adapter, targets), dropout=0.0, init=INITS[0])


def parts_of(modules: Collection[str]) -> tuple[bool, bool, bool]:
    """Return whether attention, MLP and output head are among the modules of an adapter."""
    heads = {module for module in modules if is_head(f"{module}.weight")}
    others = [*map(_is_attention, {*modules} - heads)]
    return any(others), not all(others), bool(heads)


def trains_head(spec: AdapterSpec) -> bool:
    """Return whether the output head is adapted."""
    return any(is_head(f"{target}.weight") for target in spec.targets)


def _is_linear(name: str, num_axes: int) -> bool:
    module = name.removesuffix(".weight")
    is_layer = name.endswith(".weight") and num_axes == 2 and position_of(module) is not None
    return is_layer and is_text(module) and not (is_in_router(module) or is_embedding(name) or is_head(name))


def _is_attention(module: str) -> bool:
    return any(_ATTENTION.fullmatch(part) for part in module.split(".")[:-1])
