"""mlx-lm's adapter directory <-> the canonical adapter.

mlx-lm (`mlx_lm/tuner/lora.py`, 0.32) computes y = W x + scale · (x A) B with `<module>.lora_a` [in, r] and `.lora_b`
[r, out]: both are transposes of ours, and `scale` multiplies directly, where PEFT divides alpha by the rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.adapter import fields, gpt2
from dualtune.adapter.canonical import Pairs, Parts, alpha_of, check_rank, pair_up, to_pairs, to_tensors
from dualtune.adapter.layers import exact_targets, place_of, short_targets
from dualtune.adapter.spec import LoraSpec, Tensors
from dualtune.errors import FormatError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"

_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<part>[ab])")
_EXPERT = re.compile(r"\.experts\.\d+\.")
# mlx-lm names the two matrices of an adapted embedding as those of a linear layer; only the module tells them apart.
_EMBEDDING = re.compile(r"(.*\.)?(embed\w*|wte|wpe|tok_embeddings|word_embeddings)")


def read_mlx(config: Mapping[str, Any], tensors: Tensors, directory: Path) -> Parts:
    """The canonical adapter of a parsed adapter_config.json and the tensors of adapters.safetensors."""
    where = directory / CONFIG_FILE
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise fields.wrong(where, "fine_tune_type", kind, "lora: dora and full are no sum of a base and an update B A")
    fields.required(config, "lora_parameters", where)
    parameters, where_parameters = fields.subtable(config, "lora_parameters", where), f"{where}: lora_parameters"
    if "scale" not in parameters and "alpha" in parameters:
        raise FormatError(
            f"{where_parameters}: scale: missing, and mlx-lm ignores 'alpha' "
            f"({fields.shown(fields.text_of(parameters['alpha']))}). "
            "If alpha / rank was meant, write that as scale."
        )
    rank = fields.rank(parameters, "rank", where_parameters)
    scale = fields.positive(parameters, "scale", where_parameters)
    keys = fields.texts(parameters, "keys", where_parameters)
    keys = keys and [gpt2.canonical_name(key) for key in keys]
    named = _pairs(tensors, directory / WEIGHTS_FILE)
    pairs = {gpt2.canonical_name(module): pair for module, pair in named.items()}
    for module, pair in pairs.items():
        check_rank(module, pair, rank, f"{directory / WEIGHTS_FILE} (transposed)")
        if keys is not None and not _is_selected(module, keys):
            raise FormatError(f"{directory / WEIGHTS_FILE}: {module}: not selected by lora_parameters.keys")
    spec = LoraSpec(
        rank=rank,
        alpha=alpha_of(scale, rank),
        dropout=fields.probability(parameters, "dropout", where_parameters),
        targets=_targets(pairs, keys),
    )
    base_model = fields.name(config, "base_model_name_or_path", where) or fields.name(config, "model", where)
    notes = ("lora_parameters.alpha is ignored, as mlx-lm does: scale counts",) if "alpha" in parameters else ()
    return Parts(spec, to_tensors(pairs), base_model, notes, any(map(gpt2.is_mlx_name, named)))


def mlx_config(spec: LoraSpec, modules: Collection[str], *, fan_in_fan_out: bool = False) -> dict[str, Any]:
    """mlx-lm's keys of adapter_config.json.

    `num_layers` counts from the end, so -1 (all of them) is the one value that is right without the model; `keys` are
    always given because without them mlx-lm would wrap every linear layer.
    """
    targets = exact_targets(modules, spec.targets)
    keys = dict.fromkeys(_key(module, targets) for module in sorted(modules))
    return {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {
            "rank": spec.rank,
            "scale": spec.scale,
            "dropout": spec.dropout,
            "keys": [gpt2.mlx_name(key) for key in keys] if fan_in_fan_out else list(keys),
        },
    }


def mlx_tensors(tensors: Tensors, *, fan_in_fan_out: bool = False) -> Tensors:
    """The canonical tensors in mlx-lm's names and orientation.

    Contiguous copies, because safetensors writes the buffer of a transposed view as it lies.
    """
    renamed: Tensors = {}
    for module, pair in to_pairs(tensors, "adapter").items():
        if _EXPERT.search(module):
            raise FormatError(
                f"adapter: {module}: mlx-lm stacks the experts of a layer in one tensor, so that it cannot load an "
                "adapter of a single one. Write it with the layout peft."
            )
        name = gpt2.mlx_name(module) if fan_in_fan_out else module
        renamed[f"{name}.lora_a"] = np.ascontiguousarray(pair.A_rI.T, np.float32)
        renamed[f"{name}.lora_b"] = np.ascontiguousarray(pair.B_Or.T, np.float32)
    return renamed


def _pairs(tensors: Tensors, where: Path) -> Pairs:
    halves: dict[tuple[str, str], np.ndarray] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            kind = "DoRA's magnitude" if name.endswith(".m") else "not part of a LoRA adapter"
            raise FormatError(f"{where}: tensor {name!r}: {kind}; only lora_a and lora_b can be converted")
        if _EMBEDDING.fullmatch(match["module"]):
            raise FormatError(f"{where}: tensor {name!r}: LoRA of an embedding cannot be converted")
        # A stack of experts is no matrix: `pair_up` refuses it, and its orientation does not matter.
        halves[match["module"], match["part"].upper()] = tensor.T if tensor.ndim == 2 else tensor
    return pair_up(halves, where)


def _is_selected(module: str, keys: Collection[str]) -> bool:
    """mlx-lm's `linear_to_lora_layers`: a full path, or a name relative to each layer, exactly."""
    place = place_of(module)
    return module in keys or (place is not None and place.name in keys)


def _key(module: str, targets: Collection[str]) -> str:
    """The layer-relative name where the targets mean every layer, else the full path."""
    place = place_of(module)
    return module if place is None or module in targets else place.name


def _targets(pairs: Pairs, keys: list[str] | None) -> tuple[str, ...]:
    """Short names where whole layers are adapted, except where the keys list the layers one by one.

    With `num_layers` (the last n) alone, layer 0 is adapted only if all of them are.
    """
    by_path = keys is not None and any(place_of(module) and module in keys for module in pairs)
    return tuple(sorted(pairs)) if by_path else short_targets(pairs)
