"""mlx-lm's adapter directory <-> the canonical adapter.

mlx-lm (`mlx_lm/tuner/lora.py`, 0.32) computes y = W x + scale · (x A) B with `<module>.lora_a` [in, r] and `.lora_b`
[r, out]: both are transposes of ours, and `scale` is a direct factor, where PEFT divides alpha by the rank. Experts are
stacks there (`dualtune.model.formats.stacks`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base import fields
from dualtune.base.errors import FormatError
from dualtune.model.adapter import AdapterSpec, Tensors, exact_targets, short_targets, tensor_name
from dualtune.model.experts import collapsed, expert_of, without_number
from dualtune.model.formats import naming, stacks
from dualtune.model.formats.canonical import (
    PAIR,
    Pairs,
    Parts,
    alpha_of,
    check_extras,
    check_rank,
    extra_tensors,
    pair_up,
    to_pairs,
    to_tensors,
)
from dualtune.model.methods import METHODS
from dualtune.model.methods.method import Method
from dualtune.model.targets import position_of

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"

# mlx-lm names the two matrices of an adapted embedding as those of a linear layer; only the module name differs.
_EMBEDDING = re.compile(r"(.*\.)?(embed\w*|wte|wpe|tok_embeddings|word_embeddings)")


def read_mlx(
    config: Mapping[str, Any], tensors: Tensors, directory: Path, names: naming.Naming = naming.PLAIN
) -> Parts:
    """Return the canonical adapter of a parsed adapter_config.json and the tensors of adapters.safetensors."""
    where = directory / CONFIG_FILE
    method = _method(config.get("fine_tune_type", "lora"), where)
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
    keys = keys and [naming.canonical_name(key) for key in keys]
    named, of_experts, extras = _split(tensors, method, directory / WEIGHTS_FILE)
    pairs = {naming.canonical_name(module): pair for module, pair in named.items()}
    for module in (*pairs, *of_experts):
        if keys is not None and not _is_selected(module, keys):
            raise FormatError(f"{directory / WEIGHTS_FILE}: {module}: not selected by lora_parameters.keys")
    by_path = keys is not None and any(position_of(module) and module in keys for module in (*pairs, *of_experts))
    for module, (A_ErI, B_EOr) in of_experts.items():
        pairs |= stacks.from_switch(module, A_ErI, B_EOr, names.experts, directory / WEIGHTS_FILE)
    for module, pair in pairs.items():
        check_rank(module, pair, rank, f"{directory / WEIGHTS_FILE} (transposed)")
    check_extras(method, extras, pairs, directory / WEIGHTS_FILE)
    spec = AdapterSpec(
        rank=rank,
        alpha=alpha_of(scale, rank),
        dropout=fields.probability(parameters, "dropout", where_parameters),
        targets=tuple(sorted(collapsed(pairs).values())) if by_path else short_targets(pairs),
        method=method.name,
        experts=bool(of_experts),
    )
    base_model = fields.name(config, "base_model_name_or_path", where) or fields.name(config, "model", where)
    notes = ("lora_parameters.alpha is ignored, as in mlx-lm: only scale is used",) if "alpha" in parameters else ()
    return Parts(spec, to_tensors(pairs) | extras, base_model, notes, any(map(naming.is_mlx_name, named)))


def mlx_config(
    spec: AdapterSpec,
    modules: Collection[str],
    *,
    fan_in_fan_out: bool = False,
    experts: naming.ExpertNames = naming.PLAIN.experts,
) -> dict[str, Any]:
    """Return mlx-lm's keys of adapter_config.json.

    `num_layers` counts from the end, so only -1 (all layers) is right without knowing the model. `keys` are always
    given, because without them mlx-lm would wrap every linear layer.
    """
    targets = exact_targets(modules, spec.targets)
    keys = dict.fromkeys(_key(module, targets, experts) for module in sorted(modules))
    return {
        "fine_tune_type": spec.method_spec.mlx_type,
        "num_layers": -1,
        "lora_parameters": {
            "rank": spec.rank,
            "scale": spec.scale,
            "dropout": spec.dropout,
            "keys": [naming.mlx_name(key) for key in keys] if fan_in_fan_out else list(keys),
        },
    }


def mlx_tensors(
    tensors: Tensors,
    method: str = "lora",
    *,
    fan_in_fan_out: bool = False,
    experts: naming.ExpertNames = naming.PLAIN.experts,
) -> Tensors:
    """Return the canonical tensors in mlx-lm's names and orientation.

    Contiguous copies, because safetensors writes the buffer of a transposed view in memory order.
    """
    renamed: Tensors = {}
    ends = {parameter.part: parameter.mlx for parameter in METHODS[method].parameters}
    for module in to_pairs(tensors, "adapter"):
        if expert_of(module):
            continue
        name = naming.mlx_name(module) if fan_in_fan_out else module
        for part, end in ends.items():
            renamed[f"{name}.{end}"] = np.ascontiguousarray(tensors[tensor_name(module, part, method)].T, np.float32)
    for module, stacked in stacks.to_switches(tensors, experts).items():
        renamed |= dict(zip((f"{module}.lora_a", f"{module}.lora_b"), stacked, strict=True))
    return renamed


def _method(kind: object, where: Path) -> Method:
    """Return the method of a fine_tune_type."""
    methods = {method.mlx_type: method for method in METHODS.values()}
    if not isinstance(kind, str) or kind not in methods:
        reason = "other methods do not add an update B A to the base weights"
        raise fields.wrong(where, "fine_tune_type", kind, f"{' or '.join(methods)}: {reason}")
    return methods[kind]


def _split(
    tensors: Tensors, method: Method, where: Path
) -> tuple[Pairs, dict[str, tuple[np.ndarray, np.ndarray]], Tensors]:
    """Return the pairs as the file names them, those that are stacks, and other parameters by canonical name."""
    halves, extras = dict[tuple[str, str], np.ndarray](), Tensors()
    parts = {parameter.mlx: parameter.part for parameter in method.parameters}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if not module or end not in parts:
            kind = "DoRA's magnitude (fine_tune_type: dora)" if end == "m" else f"not part of a {method.title} adapter"
            raise FormatError(f"{where}: tensor {name!r}: {kind}; only {' and '.join(parts)} can be converted")
        if _EMBEDDING.fullmatch(module):
            raise FormatError(f"{where}: tensor {name!r}: LoRA of an embedding cannot be converted")
        oriented = tensor.T if tensor.ndim == 2 else tensor  # stacks of experts are as ours
        if parts[end] in PAIR:
            halves[module, parts[end]] = oriented
        else:
            extras[tensor_name(naming.canonical_name(module), parts[end], method.name)] = oriented
    stacked = {key for key, tensor in halves.items() if tensor.ndim == 3 and method.name == "lora"}
    of_experts = {
        module: (halves[module, "A"], halves[module, "B"])
        for module, _ in sorted(stacked)
        if {(module, "A"), (module, "B")} <= stacked
    }
    others = {key: tensor for key, tensor in halves.items() if key[0] not in of_experts}
    return pair_up(others, where) if others or not of_experts else {}, of_experts, extra_tensors(extras)


def _is_selected(module: str, keys: Collection[str]) -> bool:
    """mlx-lm's `linear_to_lora_layers`: exactly a full path, or a name relative to a layer."""
    position = position_of(module)
    return module in keys or (position is not None and position.name in keys)


def _key(module: str, targets: Collection[str], experts: naming.ExpertNames) -> str:
    """Return the layer-relative name if the targets mean every layer, else the full path."""
    path = stacks.in_switch(module, experts)
    position = position_of(path)
    return path if position is None or without_number(module) in targets else position.name
