"""mlx-lm's adapter directory <-> the canonical adapter.

mlx-lm (`mlx_lm/tuner/lora.py`, 0.32) computes y = W x + scale · (x A) B with `<module>.lora_a` [in, r] and `.lora_b`
[r, out]: both are transposes of ours, and `scale` is a direct factor, where PEFT divides alpha by the rank.
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
from dualtune.model.formats import naming
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

_EXPERT = re.compile(r"\.experts\.\d+\.")
# mlx-lm names the two matrices of an adapted embedding as those of a linear layer; only the module name differs.
_EMBEDDING = re.compile(r"(.*\.)?(embed\w*|wte|wpe|tok_embeddings|word_embeddings)")


def read_mlx(config: Mapping[str, Any], tensors: Tensors, directory: Path) -> Parts:
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
    named, extras = _split(tensors, method, directory / WEIGHTS_FILE)
    pairs = {naming.canonical_name(module): pair for module, pair in named.items()}
    for module, pair in pairs.items():
        check_rank(module, pair, rank, f"{directory / WEIGHTS_FILE} (transposed)")
        if keys is not None and not _is_selected(module, keys):
            raise FormatError(f"{directory / WEIGHTS_FILE}: {module}: not selected by lora_parameters.keys")
    check_extras(method, extras, pairs, directory / WEIGHTS_FILE)
    spec = AdapterSpec(
        rank=rank,
        alpha=alpha_of(scale, rank),
        dropout=fields.probability(parameters, "dropout", where_parameters),
        targets=_targets(pairs, keys),
        method=method.name,
    )
    base_model = fields.name(config, "base_model_name_or_path", where) or fields.name(config, "model", where)
    notes = ("lora_parameters.alpha is ignored, as in mlx-lm: only scale is used",) if "alpha" in parameters else ()
    return Parts(spec, to_tensors(pairs) | extras, base_model, notes, any(map(naming.is_mlx_name, named)))


def mlx_config(spec: AdapterSpec, modules: Collection[str], *, fan_in_fan_out: bool = False) -> dict[str, Any]:
    """Return mlx-lm's keys of adapter_config.json.

    `num_layers` counts from the end, so only -1 (all layers) is right without knowing the model. `keys` are always
    given, because without them mlx-lm would wrap every linear layer.
    """
    targets = exact_targets(modules, spec.targets)
    keys = dict.fromkeys(_key(module, targets) for module in sorted(modules))
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


def mlx_tensors(tensors: Tensors, method: str = "lora", *, fan_in_fan_out: bool = False) -> Tensors:
    """Return the canonical tensors in mlx-lm's names and orientation.

    Contiguous copies, because safetensors writes the buffer of a transposed view in memory order.
    """
    renamed: Tensors = {}
    ends = {parameter.part: parameter.mlx for parameter in METHODS[method].parameters}
    for module in to_pairs(tensors, "adapter"):
        if _EXPERT.search(module):
            raise FormatError(
                f"adapter: {module}: mlx-lm stacks the experts of a layer in one tensor, so it cannot load an "
                "adapter of a single expert. Write it with the layout peft."
            )
        name = naming.mlx_name(module) if fan_in_fan_out else module
        for part, end in ends.items():
            renamed[f"{name}.{end}"] = np.ascontiguousarray(tensors[tensor_name(module, part, method)].T, np.float32)
    return renamed


def _method(kind: object, where: Path) -> Method:
    """Return the method of a fine_tune_type."""
    known = {method.mlx_type: method for method in METHODS.values()}
    if not isinstance(kind, str) or kind not in known:
        reason = "other methods do not add an update B A to the base weights"
        raise fields.wrong(where, "fine_tune_type", kind, f"{' or '.join(known)}: {reason}")
    return known[kind]


def _split(tensors: Tensors, method: Method, where: Path) -> tuple[Pairs, Tensors]:
    """Return the pairs as the file names them, and the method's other parameters by canonical name."""
    halves, extras = dict[tuple[str, str], np.ndarray](), Tensors()
    parts = {parameter.mlx: parameter.part for parameter in method.parameters}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if not module or end not in parts:
            kind = "DoRA's magnitude (fine_tune_type: dora)" if end == "m" else f"not part of a {method.title} adapter"
            raise FormatError(f"{where}: tensor {name!r}: {kind}; only {' and '.join(parts)} can be converted")
        if _EMBEDDING.fullmatch(module):
            raise FormatError(f"{where}: tensor {name!r}: LoRA of an embedding cannot be converted")
        # A stack of experts is not a matrix: `pair_up` refuses it, so its orientation does not matter.
        oriented = tensor.T if tensor.ndim == 2 else tensor
        if parts[end] in PAIR:
            halves[module, parts[end]] = oriented
        else:
            extras[tensor_name(naming.canonical_name(module), parts[end], method.name)] = oriented
    return pair_up(halves, where), extra_tensors(extras)


def _is_selected(module: str, keys: Collection[str]) -> bool:
    """mlx-lm's `linear_to_lora_layers`: exactly a full path, or a name relative to a layer."""
    position = position_of(module)
    return module in keys or (position is not None and position.name in keys)


def _key(module: str, targets: Collection[str]) -> str:
    """Return the layer-relative name if the targets mean every layer, else the full path."""
    position = position_of(module)
    return module if position is None or module in targets else position.name


def _targets(pairs: Pairs, keys: list[str] | None) -> tuple[str, ...]:
    """Return short names if whole layers are adapted, unless the keys list the layers one by one.

    With only `num_layers` (the last n), layer 0 is adapted only if all layers are.
    """
    by_path = keys is not None and any(position_of(module) and module in keys for module in pairs)
    return tuple(sorted(pairs)) if by_path else short_targets(pairs)
