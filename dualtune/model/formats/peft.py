"""PEFT's adapter directory <-> the canonical adapter.

Tensor names and orientation are already canonical; the work is in the config. Every field of LoraConfig (peft 0.21,
`peft/tuners/lora/config.py`) is in one of the two tables below, which a test compares with PEFT itself. A field that
affects the function is converted exactly or refused by name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from dualtune.base import fields
from dualtune.base.errors import FormatError
from dualtune.model.adapter import (
    AdapterSpec,
    Scaling,
    Tensors,
    divisor,
    exact_targets,
    is_module_path,
    modules_of,
    parse_name,
    pattern_of,
    short_targets,
    within_stack,
)
from dualtune.model.beside import PREFIX, ROWS, BesideAdapter, Biases, is_inside, parse_beside, whole_modules
from dualtune.model.experts import expert_of, in_transformers, without_number
from dualtune.model.formats import naming as gpt2
from dualtune.model.formats import stacks
from dualtune.model.formats.canonical import (
    PAIR,
    Pairs,
    Parts,
    alpha_of,
    check_extras,
    check_rank,
    extra_tensors,
    pair_up,
    to_tensors,
)
from dualtune.model.formats.naming import EXPERT_NAMES, PLAIN, Naming
from dualtune.model.formats.patterns import full_match, matches_end
from dualtune.model.methods import METHODS, OTHERS
from dualtune.model.methods.method import Method
from dualtune.model.targets import ALL_LINEAR, Pattern, Value, is_embedding, is_router, is_target, position_of

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_BASE_BIAS = ".base_layer.bias"  # of an adapted layer
MAX_MATCHES = 1_000_000  # of patterns with modules: takes a minute

REFUSED = {  # field, if set -> why no plain LoRA adapter computes the same function
    "alora_invocation_tokens": "aLoRA switches the adapter on in the middle of the text",
    "arrow_config": "Arrow routes between several adapters",
    "ensure_weight_tying": "the adapter of the embedding would be tied to that of the output layer",
    "kasa_config": "KaSA truncates the base weight and adds a diagonal between A and B",
    "layer_replication": "the layers of the base model are repeated",
    "lora_bias": "lora_B has a bias",
    "megatron_config": "the layers are Megatron's parallel ones",
    "monteclora_config": "MonteCLoRA samples the weights",
    "use_bdlora": "BD-LoRA stores block-diagonal matrices",
    "use_qalora": "QA-LoRA averages groups of inputs first",
    "velora_config": "VeLoRA replaces the gradient of A and stores its state with the tensors",
}
HANDLED = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "base_model_name_or_path"),
    *("rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("modules_to_save", "trainable_token_indices"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
    # The layout of the base weights. PEFT checks the layer itself, and corrects the field if it is wrong.
    "fan_in_fan_out",
    *(key for method in METHODS.values() for key in method.peft_keys),
    # No effect on the function: labels, and fields that matter only for a refused method or at initialization.
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "megatron_core"),
    *("qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
# In addition to PEFT's, in a dual directory.
MLX_KEYS = {"fine_tune_type", "num_layers", "lora_parameters", "optimizer_config"}
# Initializations that leave the base weights unchanged. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract from them, so
# that the adapter is right only with the changed base; a name that PEFT 0.21 does not have may do the same.
HARMLESS_INITS = {"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"}
# PEFT's naming of the switches of its variants. A switch that is not in the tables is from a newer PEFT.
_VARIANT_SWITCH = re.compile(r"use_\w+|\w+_config")
_LEAVES_OUT = (
    "dualtune adapter import DIR OUT --base MODEL compares it with the base and leaves it out if it is equal; or save "
    "again with save_embedding_layers=False if it was not resized"
)
_FOREIGN_TENSORS = {  # part of a tensor's name -> what it is
    "lora_magnitude_vector": "DoRA's magnitude, which belongs to use_dora: true, named <module>.lora_magnitude_vector",
    "lora_embedding_": "LoRA of an embedding",
    "modules_to_save": "a fully trained module, which modules_to_save does not name",
    ".bias": "a trained bias",
    "base_layer": f"a copy of a base weight. {_LEAVES_OUT}",
    "embed_tokens.weight": f"a copy of the embedding. {_LEAVES_OUT}",
    "lm_head.weight": f"a copy of the output head. {_LEAVES_OUT}",
    "": "not part of a LoRA adapter",
}


def read_peft(config: Mapping[str, Any], tensors: Tensors, directory: Path, naming: Naming = PLAIN) -> Parts:
    """Return the canonical adapter of a parsed adapter_config.json and the tensors of adapter_model.safetensors."""
    where = directory / CONFIG_FILE
    if naming.exclusion is not None and config.get("exclude_modules") == naming.exclusion:
        config = {key: value for key, value in config.items() if key != "exclude_modules"}  # towers have no adapters
    notes = _check_config(config, where)
    method = _method(config)
    scaling: Scaling = "rank_stabilized" if config.get("use_rslora") else "standard"
    tensors = {name.replace(_BASE_BIAS, ".bias"): x for name, x in tensors.items()}
    beside, own = _beside(config, tensors, where, directory / WEIGHTS_FILE)
    pairs = _pairs({name: x for name, x in tensors.items() if name not in own}, method, directory / WEIGHTS_FILE)
    for key in ("rank_pattern", "alpha_pattern"):
        if (count := len(fields.subtable(config, key, where)) * len(pairs)) > MAX_MATCHES:
            raise FormatError(f"{where}: {key}: got {count} patterns times modules, must be at most {MAX_MATCHES}")
    parameters, sources = fields.texts(config, "target_parameters", where) or [], dict[str, str]()
    if any(map(stacks.is_parameter, parameters)):
        pairs, sources = stacks.from_parameters(
            pairs, naming.experts, parameters, lambda path: _rank(path, config, where), directory / WEIGHTS_FILE,
        )  # fmt: skip
    _check_parameters(config, pairs, where)
    if beside.bias == "lora_only":
        places = [place for name in own if (place := parse_beside(name)) and place[1] == "bias"]
        if other := [
            m for m, _ in places if m not in pairs and not any(is_inside(m, whole) for whole in beside.modules)
        ]:
            raise FormatError(f"{directory / WEIGHTS_FILE}: bias: lora_only, but {other[0]} with a bias has no adapter")
    for module in pairs.keys() - sources.keys():
        if not any(_is_selected(path, config, where) for path in (module, without_number(module))):
            raise FormatError(f"{directory / WEIGHTS_FILE}: {module}: not selected by target_modules of {CONFIG_FILE}")
    paths = {module: sources.get(module) or _path(module, parameters) for module in pairs}
    ranks = {module: _rank(path, config, where) for module, path in paths.items()}
    alphas = {module: _alpha(path, config, where) for module, path in paths.items()}
    for module in sources:  # gate and up have half of the rank of the parameter that they share, and its scale
        scale, half = alphas[module] / divisor(ranks[module], scaling), len(pairs[module].A_rI)
        ranks[module], alphas[module] = half, alpha_of(scale, half, scaling)
    for module, pair in pairs.items():
        check_rank(module, pair, ranks[module], directory / WEIGHTS_FILE)
    check_extras(method, extras := extra_tensors(tensors), pairs, directory / WEIGHTS_FILE)
    rank, alpha = _common(ranks, config.get("r")), _common(alphas, config.get("lora_alpha"))
    spec = AdapterSpec(
        rank=rank,
        alpha=alpha,
        dropout=fields.probability({"lora_dropout": 0.0, **config}, "lora_dropout", where),
        targets=_targets(pairs, config, where),
        scaling=scaling,
        method=method.name,
        beside=beside,
        rank_pattern=pattern_of(ranks, rank, _names_in(config, "rank_pattern", where)),
        alpha_pattern=pattern_of(alphas, alpha, _names_in(config, "alpha_pattern", where)),
        experts=stacks.experts_among(to_tensors(pairs)),
    )
    base_model = fields.name(config, "base_model_name_or_path", where)
    shapes = {module: pair.delta_shape for module, pair in pairs.items()}
    fan_in_fan_out = bool(config.get("fan_in_fan_out")) or gpt2.has_gpt2_attention(shapes)
    return Parts(spec, to_tensors(pairs) | extras | own, base_model, tuple(notes), fan_in_fan_out)


def _beside(config: Mapping[str, Any], tensors: Tensors, where: Path, weights: Path) -> tuple[BesideAdapter, Tensors]:
    """Return what was trained beside the adapter, and its tensors. FormatError unless config and tensors agree."""
    names = tuple(fields.texts(config, "modules_to_save", where) or ())
    tables, bias = _token_tables(config, where), _bias(config, where)
    whole, rows = Tensors(), Tensors()
    for name, tensor in tensors.items():
        place = parse_beside(name)
        if place is None or parse_name(name) is not None:
            continue
        if place[1] == ROWS:
            rows[name] = tensor
        elif any(is_inside(place[0], module) for module in names) or (bias != "none" and place[1] == "bias"):
            whole[name] = tensor
    for module in names:
        if not any(is_inside(place[0], module) for name in whole if (place := parse_beside(name))):
            raise FormatError(f"{weights}: modules_to_save of {where.name} names {module!r}, but no tensor is of it")
    if not any(name.endswith(".bias") for name in whole):
        bias = "none"  # of a model that has none, whatever was asked for
    if bool(rows) != bool(tables):
        raise FormatError(f"{weights}: trainable_token_indices of {where.name} and the tensors {ROWS} do not agree")
    ids = {*tables.values()}
    if len(ids) > 1:
        raise fields.wrong(
            where,
            "trainable_token_indices",
            config["trainable_token_indices"],
            "the same ids for all modules: the rows of a token are trained in all of them, or in none",
        )
    indices = next(iter(ids), ())
    for name, tensor in rows.items():
        module = cast(tuple[str, str], parse_beside(name))[0]
        if tensor.ndim != 2 or len(tensor) != len(indices):
            raise FormatError(f"{weights}: {name}: got shape {[*tensor.shape]}, must be [{len(indices)}, width]")
        if None not in tables and not is_target(module, [table for table in tables if table]):
            raise FormatError(f"{weights}: {name}: not selected by trainable_token_indices of {where.name}")
    if None in tables and len(rows) > 1:
        raise FormatError(f"{weights}: rows of {len(rows)} modules, but trainable_token_indices names none")
    row_modules = tuple(sorted(cast(tuple[str, str], parse_beside(name))[0] for name in rows))
    beside = BesideAdapter(names, indices, row_modules, bias)
    return beside, {name: np.ascontiguousarray(x, np.float32) for name, x in (whole | rows).items()}


def _bias(config: Mapping[str, Any], where: Path) -> Biases:
    bias = config.get("bias", "none")
    if bias not in get_args(Biases):
        raise fields.wrong(where, "bias", bias, f"one of {', '.join(get_args(Biases))}")
    return bias


def written_names(tensors: Tensors, spec: AdapterSpec) -> Tensors:
    """Return tensors in PEFT's names, where the bias of an adapted layer is that of the layer inside of it."""
    if spec.beside.bias == "none":
        return tensors
    biases = {f"{PREFIX}{module}.bias": f"{PREFIX}{module}{_BASE_BIAS}" for module in modules_of(tensors)}
    return {biases.get(name, name): x for name, x in tensors.items()}


def _token_tables(config: Mapping[str, Any], where: Path) -> dict[str | None, tuple[int, ...]]:
    """Return the token ids by module; None: the embedding, which a plain list means."""
    value: Any = config.get("trainable_token_indices") or {}
    tables = cast(dict[Any, Any], value if isinstance(value, dict) else {None: value})
    for module, ids in tables.items():
        is_valid = isinstance(ids, list) and all(type(id) is int and id >= 0 for id in cast(list[Any], ids))
        if not (is_valid and ids and (module is None or is_module_path(module))):
            raise fields.wrong(where, "trainable_token_indices", tables, "a list of token ids, or one for each module")
    return {module: tuple(ids) for module, ids in tables.items()}


def _beside_keys(spec: AdapterSpec, tensors: Collection[str]) -> dict[str, Any]:
    """Return PEFT's keys for what is trained beside the adapter, with whole paths: a name would select by any end."""
    places = [place for name in tensors if (place := parse_beside(name))]
    keys: dict[str, Any] = {}
    if whole := whole_modules(places, spec.beside.bias):
        keys["modules_to_save"] = whole
    if tables := sorted(module for module, end in places if end == ROWS):
        ids = [*spec.beside.rows]
        is_embedding_alone = len(tables) == 1 and is_embedding(f"{tables[0]}.weight")
        keys["trainable_token_indices"] = ids if is_embedding_alone else dict.fromkeys(tables, ids)
    return keys


def peft_config(
    spec: AdapterSpec,
    modules: Collection[str],
    base_model: str | None,
    *,
    of_base: Collection[str] = (),
    fan_in_fan_out: bool = False,
    naming: Naming = PLAIN,
    of_experts: Mapping[str, tuple[int, float]] | None = None,
) -> dict[str, Any]:
    """Return the adapter_config.json of a canonical adapter that has an integer alpha.

    `of_base`: the names of its tensors that are parameters of the base. `of_experts`: the rank and the scale of each
    adapted parameter that is a stack of experts.
    """
    assert spec.alpha == int(spec.alpha), spec
    fused = dict(of_experts or {})
    named = spec.targets if not fused else [t for t in spec.targets if t == ALL_LINEAR or _selects_any(t, modules)]
    targets, weights = list(exact_targets(modules, named) if modules else ()), by_parameter(spec, modules, naming)
    linear = [module for module in modules if module not in weights]
    if weights:
        targets = [target for target in targets if not _drops(target)]
    parameters = [*weights.values()]
    if naming.exclusion is not None:  # whole paths of files are those of no class
        targets, parameters = [*map(within_stack, targets)], [*map(within_stack, parameters)]
    parameters += sorted(fused)
    extra: dict[str, Any] = {"target_parameters": parameters} if parameters else {}
    ranks = _written({m: spec.rank_of(m) for m in linear}, spec.rank, spec.rank_pattern, Path(CONFIG_FILE))
    alphas = _written({m: spec.alpha_of(m) for m in linear}, spec.alpha, spec.alpha_pattern, Path(CONFIG_FILE))
    ranks |= _of_parameters({path: spec.rank_of(m) for m, path in weights.items()}, spec.rank)
    alphas |= _of_parameters({path: spec.alpha_of(m) for m, path in weights.items()}, spec.alpha)
    if naming.exclusion is not None:
        ranks, alphas = ({within_stack(name): v for name, v in pattern.items()} for pattern in (ranks, alphas))
    # First, because the first that matches counts, and a name of linear layers may be the end of a parameter's path.
    of_parameters = {path: alpha_of(scale, rank, spec.scaling) for path, (rank, scale) in fused.items()}
    ranks = {path: rank for path, (rank, _) in fused.items() if ranks or rank != spec.rank} | ranks
    alphas = {path: alpha for path, alpha in of_parameters.items() if alphas or alpha != spec.alpha} | alphas
    if naming.exclusion is not None:
        extra["exclude_modules"] = naming.exclusion
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha),
        **({"rank_pattern": ranks} if ranks else {}),
        **({"alpha_pattern": {n: int(a) if a == int(a) else a for n, a in alphas.items()}} if alphas else {}),
        "lora_dropout": 0.0 if parameters else spec.dropout,  # of parameters PEFT allows none; mlx-lm's keys have it
        "target_modules": targets,
        "bias": spec.beside.bias,
        "fan_in_fan_out": fan_in_fan_out,
        "use_rslora": spec.scaling == "rank_stabilized",
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        **spec.method_spec.peft_keys,
        **_beside_keys(spec, of_base),
        **extra,
    }


def _selects_any(target: str, modules: Iterable[str]) -> bool:
    return any(is_target(module, (target,)) for module in modules)


def by_parameter(spec: AdapterSpec, modules: Collection[str], naming: Naming) -> dict[str, str]:
    """Return the modules that are written as parameters, because PEFT would drop or refuse their adapters, and these.

    PEFT adapts parameters by plain LoRA only.
    """
    if not naming.has_experts or spec.method != "lora":
        return {}
    return {module: f"{in_transformers(module)}.weight" for module in sorted(filter(_drops, modules))}


def _drops(module: str) -> bool:
    """Return whether PEFT drops an adapter of a module, or refuses it, in a model with experts."""
    return module.rpartition(".")[2] in EXPERT_NAMES or is_router(module)


def _of_parameters(values: Mapping[str, Value], default: Value) -> dict[str, Value]:
    """Return PEFT's pattern of the values of adapted parameters. It matches their whole names: `gate.weight`."""
    by_end: dict[str, set[Value]] = defaultdict(set)
    for path, value in values.items():
        by_end[_end(path)].add(value)
    others = {path: value for path, value in values.items() if value != default}
    return {_end(path) if len(by_end[_end(path)]) == 1 else path: value for path, value in others.items()}


def _end(parameter: str) -> str:
    return ".".join(parameter.split(".")[-2:])  # gate.weight


def _path(module: str, parameters: Collection[str]) -> str:
    """Return the path by which PEFT's patterns select a module: of an adapted parameter its whole name."""
    parameter = f"{in_transformers(module)}.weight"
    return parameter if is_target(parameter, parameters) else module


def _check_parameters(config: Mapping[str, Any], pairs: Pairs, where: Path) -> None:
    """Raise FormatError for adapted parameters that are not the weight of a linear layer."""
    for name in fields.texts(config, "target_parameters", where) or ():
        module, _, last = name.rpartition(".")
        if stacks.is_parameter(name):
            continue
        if last != "weight" or not any(is_target(in_transformers(path), (module,)) for path in pairs):
            allowed = (
                "the weights of linear layers, and the stacks of experts that transformers calls gate_up_proj, up_proj "
                "and down_proj"
            )
            raise fields.wrong(where, "target_parameters", name, allowed)


def _check_config(config: Mapping[str, Any], where: Path) -> list[str]:
    """Refuse what cannot be converted; return notes on unknown fields."""
    if (peft_type := fields.required(config, "peft_type", where)) != "LORA":
        reason = OTHERS.get(str(peft_type).lower(), "other methods do not add an update B A to the base weights")
        raise fields.wrong(where, "peft_type", peft_type, f"LORA: {reason}")
    for key, reason in REFUSED.items():
        if value := config.get(key):
            raise fields.wrong(where, key, value, f"unset: {reason}, which a plain LoRA adapter cannot express")
    if str(init := config.get("init_lora_weights", True)).lower() not in HARMLESS_INITS:
        advice = "Save it with path_initial_model_for_weight_conversion, which converts it to plain LoRA"
        raise fields.wrong(where, "init_lora_weights", init, f"one that does not change the base weights. {advice}")
    unknown = sorted(key for key, value in config.items() if value and key not in {*REFUSED, *HANDLED, *MLX_KEYS})
    for key in filter(_VARIANT_SWITCH.fullmatch, unknown):
        raise fields.wrong(where, key, config[key], "unset: peft 0.21 does not have it, and it may change the function")
    return [f"unknown to peft 0.21, ignored: {', '.join(map(repr, unknown))[:200]}"] if unknown else []


def _method(config: Mapping[str, Any]) -> Method:
    """Return the method by its keys in the config, of several the last in the table: LoRA, the first, has none.

    As in PEFT, a switch is on if Python considers it true.
    """
    marked = [
        m for m in METHODS.values() if all(bool(config.get(key)) == bool(m.peft_keys[key]) for key in m.peft_keys)
    ]
    return marked[-1]


def _pairs(tensors: Tensors, method: Method, where: Path) -> Pairs:
    places = {name: parse_name(name) for name in tensors}
    foreign = [name for name, parsed in places.items() if parsed is None or parsed[1] not in method.parts]
    # In the table's order: an adapted embedding explains why a copy of its base weight is there too.
    for part, kind in _FOREIGN_TENSORS.items():
        for name in foreign:
            if part in name:
                raise FormatError(f"{where}: tensor {name!r} cannot be converted: {kind}")
    return pair_up({parsed: tensors[name] for name, parsed in places.items() if parsed and parsed[1] in PAIR}, where)


def _rank(module: str, config: Mapping[str, Any], where: Path) -> int:
    patterns = fields.subtable(config, "rank_pattern", where)
    key = _matching_pattern(patterns, module, where)
    return fields.rank(config, "r", where) if key is None else fields.rank(patterns, key, f"{where}: rank_pattern")


def _alpha(module: str, config: Mapping[str, Any], where: Path) -> float:
    patterns = fields.subtable(config, "alpha_pattern", where)
    key = _matching_pattern(patterns, module, where)
    if key is None:
        return fields.positive(config, "lora_alpha", where)
    return fields.positive(patterns, key, f"{where}: alpha_pattern")


def _common(values: Mapping[str, Value], default: object) -> Value:
    """Return the default of the config; where the patterns leave it to no module, the value of most of them."""
    return next((value for value in values.values() if value == default), Counter(values.values()).most_common(1)[0][0])


def _matching_pattern(patterns: Iterable[str], module: str, where: Path) -> str | None:
    """PEFT's `get_pattern_key`: the first pattern that matches the end of the path."""
    return next((pattern for pattern in patterns if matches_end(pattern, module, where)), None)


def _names_in(config: Mapping[str, Any], key: str, where: Path) -> Pattern[Any]:
    """Return the entries whose regular expression is a plain name, which is also one of our targets."""
    return tuple((name, value) for name, value in fields.subtable(config, key, where).items() if is_module_path(name))


def _written(values: Mapping[str, Value], default: Value, pattern: Pattern[Value], where: Path) -> dict[str, Value]:
    """Return PEFT's pattern of the values of modules: expressions for the ends of their paths."""

    def read(module: str, pattern: Pattern[Value], default: Value) -> Value:
        key = _matching_pattern(dict(pattern), module, where)
        return default if key is None else dict(pattern)[key]

    return dict(pattern_of(values, default, pattern, read))


def _is_selected(module: str, config: Mapping[str, Any], where: Path) -> bool:
    """PEFT's `check_target_module_exists`."""
    targets, excluded = _selector(config, "target_modules", where), _selector(config, "exclude_modules", where)
    if excluded and _selects(excluded, module, where):
        return False
    if _path(module, fields.texts(config, "target_parameters", where) or ()) != module:
        return True
    if targets is None or targets == ALL_LINEAR:
        return True
    if isinstance(targets, str) or module in targets:
        return _selects(targets, module, where)
    return _selects(targets, module, where) and _is_in_layers(module, config, where)


def _is_in_layers(module: str, config: Mapping[str, Any], where: Path) -> bool:
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    stacks, position = _selector(config, "layers_pattern", where), position_of(module)
    stacks = [stacks] if isinstance(stacks, str) and stacks else stacks
    if position is None or (
        stacks and not any(full_match(rf"(.*\.)?{stack}", position.stack, where) for stack in stacks)
    ):
        return False
    return position.layer in (layers if isinstance(layers, list) else [layers])


def _selector(config: Mapping[str, Any], key: str, where: Path) -> str | list[str] | None:
    """Return a regular expression, a list of names, or None."""
    value = config.get(key)
    return value if isinstance(value, str) else fields.texts(config, key, where)


def _selects(rule: str | list[str], module: str, where: Path) -> bool:
    return full_match(rule, module, where) if isinstance(rule, str) else is_target(module, rule)


def _targets(pairs: Pairs, config: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    """Return the config's names; full paths if it selects by an expression, a list of layers or exceptions."""
    if any(expert_of(module) for module in pairs):
        return short_targets(pairs)
    targets = _selector(config, "target_modules", where)
    if config.get("layers_to_transform") not in (None, []) or config.get("exclude_modules"):
        return tuple(sorted(pairs))
    if targets is None or targets == ALL_LINEAR:
        return short_targets(pairs)
    if isinstance(targets, str):
        return tuple(sorted(pairs))
    for target in targets:
        if not is_module_path(target):
            raise fields.wrong(where, "target_modules", target, "the names of modules, or one regular expression")
    parameters = {name.rpartition(".")[0] for name in fields.texts(config, "target_parameters", where) or ()}
    if not parameters:
        return tuple(dict.fromkeys(targets))
    return exact_targets(pairs, dict.fromkeys([*targets, *sorted({m.rpartition(".")[2] for m in parameters})]))
