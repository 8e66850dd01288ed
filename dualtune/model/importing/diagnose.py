"""Find faults in the config of a foreign adapter directory, and contradictions between config and weights.

Each function checks one kind of damage. It returns the config as it would be after repair, and adds a `Finding` with
the repair, or without one if the directory does not determine exactly one right answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from dualtune.base import fields
from dualtune.base.errors import FormatError
from dualtune.model.formats.canonical import Pairs
from dualtune.model.formats.stacks import is_mixture
from dualtune.model.importing.foreign import Finding
from dualtune.model.targets import ALL_LINEAR, OUTPUT_HEAD, is_target, position_of

Config = dict[str, Any]
MAX_MODULES = 200_000  # a model with hundreds of experts in each layer has 50,000
_TYPED = {"r": int, "lora_alpha": float, "lora_dropout": float, "rank": int, "scale": float, "dropout": float}


class ScaleSettings(NamedTuple):
    """What PEFT's and mlx-lm's keys say about rank, alpha and scale; None if a key is absent or not a number."""

    r: int | None
    lora_alpha: float | None
    peft_scale: float | None  # lora_alpha / r, or / sqrt(r) under rsLoRA
    rank: int | None
    scale: float | None


def has_peft_keys(config: Mapping[str, Any]) -> bool:
    return bool({"peft_type", "r", "lora_alpha"} & config.keys())


def has_mlx_keys(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("lora_parameters"), dict)


def scale_settings(config: Mapping[str, Any]) -> ScaleSettings:
    table: Mapping[str, Any] = cast("Config", config["lora_parameters"]) if has_mlx_keys(config) else {}
    r, rank = _rank(config.get("r")), _rank(table.get("rank"))
    alpha, scale = _number(config.get("lora_alpha")), _number(table.get("scale"))
    divisor = math.sqrt(r) if r and config.get("use_rslora") else r
    return ScaleSettings(r, alpha, alpha / divisor if alpha is not None and divisor else None, rank, scale)


def _rank(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 31 else None


def _number(value: object) -> float | None:
    """Return a positive number that the strict reader may accept."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30 else None


def repair_types(config: Config, findings: list[Finding]) -> Config:
    """Fix numbers that a tool wrote as strings, and integers that it wrote as floats."""
    parameters = config.get("lora_parameters")
    if isinstance(parameters, dict):
        config = config | {"lora_parameters": _repair_numbers(cast("Config", parameters), findings)}
    return _repair_numbers(config, findings)


def _repair_numbers(table: Config, findings: list[Finding]) -> Config:
    repaired = dict(table)
    for key, kind in _TYPED.items():
        value = table.get(key)
        if not isinstance(value, str) and not (kind is int and isinstance(value, float)):
            continue
        try:
            number = float(value)
        except ValueError:
            continue  # the strict reader checks it
        if math.isfinite(number) and (kind is float or number == int(number)):
            repaired[key] = int(number) if kind is int else number
            findings.append(Finding(f"{key}: got {value!r:.100}, must be a number", f"writes {repaired[key]}"))
    return repaired


def repair_rank(config: Config, rank: int | None, findings: list[Finding]) -> Config:
    """Fix a rank that is missing or differs from the matrices. `rank` is theirs, None if they have different ranks."""
    settings, patterns = scale_settings(config), config.get("rank_pattern")
    if rank is None:
        return config
    if has_mlx_keys(config) and settings.rank != rank and _is_absent_or_number(config["lora_parameters"].get("rank")):
        fault = f"lora_parameters.rank: got {settings.rank or 'nothing'}, the matrices have rank {rank}"
        findings.append(Finding(fault, f"writes {rank}; scale does not depend on it"))
        config = config | {"lora_parameters": {**config["lora_parameters"], "rank": rank}}
    if not has_peft_keys(config) or settings.r == rank or patterns or not _is_absent_or_number(config.get("r")):
        return config
    if settings.r is None:
        findings.append(Finding(f"r: missing, the matrices have rank {rank}", f"writes {rank}"))
        return config | {"r": rank}
    return _repair_wrong_r(config, settings, rank, findings)


def _is_absent_or_number(value: object) -> bool:
    """Return whether it is absent or a number. The strict reader refuses anything else."""
    return value is None or _rank(value) is not None


def _repair_wrong_r(config: Config, settings: ScaleSettings, rank: int, findings: list[Finding]) -> Config:
    """Fix a wrong r. Only mlx-lm's scale shows whether the update was scaled by alpha / r or by alpha / rank."""
    fault = f"r: got {settings.r}, the matrices have rank {rank}"
    if settings.lora_alpha is None:
        return config | {"r": rank}  # a missing alpha is reported by `repair_scale`
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    if settings.scale is not None and math.isclose(settings.scale, settings.lora_alpha / divisor, rel_tol=1e-6):
        findings.append(Finding(fault, f"writes {rank}: alpha / {rank} is lora_parameters.scale"))
        return config | {"r": rank}
    by_rank, by_r = settings.lora_alpha / divisor, settings.peft_scale or 0.0
    findings.append(
        Finding(
            f"{fault}. The scale of the update is {by_rank:.6g} if r is a typo, {by_r:.6g} if the matrices were "
            f"resized later. Set r to {rank} and lora_alpha to the right scale times {divisor:.6g}"
        )
    )
    return config


def repair_scale(config: Config, layout: str, findings: list[Finding]) -> Config:
    """Fix an alpha used as scale, or a scale used as alpha, and a missing scale that another key has.

    A directory with the weights of one tool and the config keys of both was converted: the keys of the *other* tool are
    those of the training. With the weights of both tools the origin is unknown.
    """
    settings = scale_settings(config)
    if has_peft_keys(config) and "peft_type" not in config and settings.r and settings.lora_alpha:
        findings.append(Finding("peft_type: missing, but r and lora_alpha are set", "writes LORA"))
        config = config | {"peft_type": "LORA"}
    if has_peft_keys(config) and config.get("lora_alpha") is None:
        if settings.scale is None or not settings.r:
            fault = "lora_alpha: missing, so the scale of the update is unknown (PEFT would use 8)"
            findings.append(Finding(f"{fault}. Set the value used in training"))
            return config
        alpha = settings.scale * (math.sqrt(settings.r) if config.get("use_rslora") else settings.r)
        findings.append(Finding("lora_alpha: missing", f"writes {alpha:g}, from lora_parameters.scale"))
        return config | {"lora_alpha": alpha, "peft_type": config.get("peft_type", "LORA")}
    # A scale that is missing follows from the keys of the other tool.
    if has_mlx_keys(config):
        if "dropout" not in config["lora_parameters"]:
            findings.append(Finding("lora_parameters.dropout: missing", "writes 0.0, which only matters in training"))
            config = config | {"lora_parameters": {**config["lora_parameters"], "dropout": 0.0}}
        if layout == "mlx" and settings.peft_scale and config["lora_parameters"].get("scale") is None:
            fault = "lora_parameters.scale: missing"
            findings.append(Finding(fault, f"writes {settings.peft_scale:g}, from lora_alpha and r"))
            return config | {"lora_parameters": {**config["lora_parameters"], "scale": settings.peft_scale}}
    if (
        settings.peft_scale is None
        or settings.scale is None
        or config.get("rank_pattern")
        or config.get("alpha_pattern")
    ):
        return _check_alpha_inside(config, findings)
    if math.isclose(settings.peft_scale, settings.scale, rel_tol=1e-6):
        return config
    return _repair_contradiction(config, layout, settings, settings.peft_scale, settings.scale, findings)


def _repair_contradiction(
    config: Config, layout: str, settings: ScaleSettings, peft_scale: float, scale: float, findings: list[Finding]
) -> Config:
    """Resolve two different scales of the update, if one number was used for the other."""
    scale_text = f"lora_alpha {settings.lora_alpha:g} at r {settings.r} gives scale {peft_scale:g}"
    confused = math.isclose(scale, settings.lora_alpha or 0.0, rel_tol=1e-6)
    if confused and layout == "mlx":
        fault = f"alpha was used as scale: {scale_text}, but lora_parameters.scale is {scale:g}"
        findings.append(Finding(fault, f"writes scale {peft_scale:g}, which PEFT trained with"))
        return config | {"lora_parameters": {**config["lora_parameters"], "scale": peft_scale}}
    if confused and layout == "peft":
        alpha = scale * scale / peft_scale  # scale · r, or scale · sqrt(r)
        fault = f"scale was used as alpha: {scale_text}, but lora_parameters.scale is also {scale:g}"
        findings.append(Finding(fault, f"writes lora_alpha {alpha:g}, for the scale that mlx-lm trained with"))
        return config | {"lora_alpha": alpha}
    fault = f"{scale_text}, but lora_parameters.scale is {scale:g}: the directory does not show which one is right"
    findings.append(Finding(f"{fault}. Correct the wrong one"))
    return config


def _check_alpha_inside(config: Config, findings: list[Finding]) -> Config:
    """Report an alpha equal to the scale, a sign that alpha was used as scale. mlx-lm itself reads no alpha."""
    parameters = cast("Config", config["lora_parameters"]) if has_mlx_keys(config) else {}
    alpha, settings = parameters.get("alpha"), scale_settings(config)
    scale, rank = settings.scale, settings.rank
    if scale is not None and rank is not None and alpha == scale and rank != 1:
        findings.append(
            Finding(
                f"lora_parameters: scale and alpha are both {scale:g} at rank {rank}. If mlx-lm trained it, the scale "
                f"is {scale:g}; if it was converted, {scale / rank:g}. Write the right one as scale and remove alpha"
            )
        )
    return config


def repair_num_layers(config: Config, pairs: Pairs, depth: int | None, findings: list[Finding]) -> Config:
    """Fix `num_layers`: mlx-lm adapts the *last* `num_layers` layers. `depth` is the base model's number, if known."""
    if not has_mlx_keys(config):
        return config
    count, layers = config.get("num_layers"), sorted({p.layer for m in pairs if (p := position_of(m))})
    repaired = config | {"num_layers": -1}
    if count is None:
        findings.append(
            Finding("num_layers: missing, but mlx-lm requires it", "takes the layers from the tensor names")
        )
        return repaired
    if type(count) is not int or count <= 0 or not layers:
        return config
    last = list(range(max(0, depth - count), depth)) if depth else None
    fault = f"num_layers: {count} means the last {count} layers"
    if len(layers) < min(count, depth or count):
        findings.append(Finding(f"{fault}, but only {len(layers)} layers have tensors. Copy the adapter again"))
    elif len(layers) > count or (last is not None and layers != last):
        span = f"{layers[0]} to {layers[-1]}"
        findings.append(
            Finding(f"{fault}, but the tensors belong to layers {span}", "takes the layers from the tensor names")
        )
        return repaired
    return config


def missing_modules(config: Config, pairs: Pairs, base: Mapping[str, object]) -> list[Finding]:
    """Report modules that the config selects and the weights lack: by the base model, else by the other layers."""
    layout = "mlx" if has_mlx_keys(config) and not has_peft_keys(config) else "peft"
    targets = config["lora_parameters"].get("keys") if layout == "mlx" else config.get("target_modules")
    if config.get("exclude_modules") or (isinstance(targets, str) and targets != ALL_LINEAR):
        return []  # selected by hand: the strict reader compares it with the weights
    names = [t for t in cast("list[object]", targets if isinstance(targets, list) else []) if isinstance(t, str)]
    layers = _selected_layers(config, layout, pairs)
    if base and targets == ALL_LINEAR:
        selected = {m for m in base if m.rpartition(".")[2] != OUTPUT_HEAD}
    elif base and names:
        selected = {m for m in base if is_target(m, names)}
    else:
        analogous = _by_analogy(pairs, names, first=None if layers else 0)
        selected = analogous & base.keys() if base else analogous
    # transformers 5 fuses the experts that a file stores one by one, so that PEFT does not find them.
    selected = {m for m in selected if ".experts." not in m}
    expected = {
        m for m in selected if m in names or layers is None or (p := position_of(m)) is None or p.layer in layers
    }
    missing: list[Finding] = []
    if lost := sorted(expected - pairs.keys()):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        fault = f"the weights of {lost[0]}{more} are missing, though the config selects them. Copy the adapter again"
        missing.append(Finding(fault if base else f"{fault}, or give --base if the model has no such layer"))
    idle = [name for name in names if not base and not any(is_target(m, [name]) for m in pairs)]
    if idle:
        fault = (
            f"no weights for {', '.join(map(fields.shown, idle[:8]))}, which the config selects. Copy the adapter again"
        )
        missing.append(Finding(f"{fault}, or give --base if the model has no such layer"))
    return missing


def _by_analogy(pairs: Pairs, names: list[str], first: int | None) -> set[str]:
    """Return the modules adapted in some layer by a name without layer number, in each layer from first to last."""
    general = [name for name in names if not any(part.isdecimal() for part in name.split("."))]
    selected = [module for module in pairs if not names or is_target(module, general)]
    positions = [position for module in selected if (position := position_of(module))]
    if not positions:
        return set()
    layers = [position.layer for position in positions]
    kinds = {(position.stack, position.name) for position in positions}
    start = min(layers) if first is None else first
    if (count := len(kinds) * (max(layers) + 1 - start)) > MAX_MODULES:
        raise FormatError(
            f"layer {max(layers)} is adapted, so there would be {count} modules; at most {MAX_MODULES} are allowed"
        )
    return {f"{stack}.{n}.{name}" for stack, name in kinds for n in range(start, max(layers) + 1)}


def _selected_layers(config: Config, layout: str, pairs: Pairs) -> set[int] | None:
    """Return the layers that the config restricts the adapter to, None for all."""
    if layout == "peft":
        layers = config.get("layers_to_transform")
        numbers = cast("list[object]", layers if isinstance(layers, list) else [layers])
        return {n for n in numbers if type(n) is int} or None
    count = config.get("num_layers", 0)
    present = {position.layer for m in pairs if (position := position_of(m))}
    return None if type(count) is int and count < 0 else present


def rename_by_base(modules: Iterable[str], base: Mapping[str, object], findings: list[Finding]) -> dict[str, str]:
    """Return module -> the base model's name, if it differs: `model.model.`, `language_model.`."""
    renamed: dict[str, str] = {}
    for module in modules:
        if is_mixture(module):  # PEFT's parameters of experts are in a module that holds no layer
            continue
        if not base:
            if module.startswith("model.model."):
                findings.append(Finding(f"{module}: starts with model. twice. Give --base to find its right name"))
                break
            continue
        if module in base:
            continue
        same = [other for other in base if _is_namesake(module, other)]
        if len(same) != 1:
            reason = f"could be {', '.join(sorted(same)[:3])}" if same else "is not a linear layer of the base model"
            findings.append(Finding(f"{module} {reason}. Check that --base is the model of the training"))
            break
        renamed[module] = same[0]
    if renamed:
        old, new = next(iter(renamed.items()))
        fault = f"{len(renamed)} modules have different names in the base model: {old} is {new} there"
        findings.append(Finding(fault, "uses the base model's names"))
    return renamed


def _is_namesake(module: str, other: str) -> bool:
    """Return whether both are the same module of the same layer, whatever contains the layers.

    Outside of layers, compare the ends of the paths.
    """
    a, b = position_of(module), position_of(other)
    if a is None or b is None:
        return a is b and (module.endswith("." + other) or other.endswith("." + module))
    same_stack = a.stack.rpartition(".")[2] == b.stack.rpartition(".")[2]
    return same_stack and (a.layer, a.name) == (b.layer, b.name)


def rename_in_config(config: Config, renamed: Mapping[str, str]) -> Config:
    """Return the config with the full paths among its targets renamed."""

    def new(names: object) -> object:
        return [renamed.get(n, n) if isinstance(n, str) else n for n in names] if isinstance(names, list) else names  # type: ignore[misc]

    config = config | ({"target_modules": new(config["target_modules"])} if "target_modules" in config else {})
    if has_mlx_keys(config) and "keys" in config["lora_parameters"]:
        config["lora_parameters"] = {**config["lora_parameters"], "keys": new(config["lora_parameters"]["keys"])}
    return config
