"""Import of foreign or damaged adapter directories: `dualtune adapter import`.

Faults are found first (`foreign`, `diagnose`), and fixed on request if the directory itself determines
exactly one right answer. The result goes through the same strict readers as any adapter: only they decide what an
adapter computes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.errors import FormatError
from dualtune.base.untrusted import sha256_of
from dualtune.model.adapter import Tensors, tensor_name
from dualtune.model.formats import canonical, mlx_lm, peft
from dualtune.model.formats.canonical import Pair, Pairs, Parts
from dualtune.model.formats.chat_template import read_template
from dualtune.model.formats.directory import SAME_FUNCTION, Adapter, adapter_directory
from dualtune.model.formats.naming import is_fan_in_fan_out
from dualtune.model.formats.stacks import is_mixture
from dualtune.model.importing import diagnose
from dualtune.model.importing.foreign import (
    Finding,
    Reading,
    Shapes,
    WeightFile,
    base_shapes,
    common_rank,
    config_of,
    open_source,
    readings,
    unscrambled,
    without_copies,
)
from dualtune.model.targets import position_of


@dataclass(frozen=True, slots=True)
class ImportedAdapter:
    """An adapter in canonical form, the repairs that were made, and notes."""

    adapter: Adapter
    source: str  # PEFT, mlx-lm, both, or a tool that is recognized by its keys
    repaired: tuple[Finding, ...]
    warnings: tuple[str, ...]
    metadata: dict[str, Any]  # for dualtune.json


def import_adapter(path: str | os.PathLike[str], *, base: Path | None = None, repair: bool = False) -> ImportedAdapter:
    """Return the adapter of a directory of PEFT, mlx-lm, Unsloth, mlx-tune, Soup or dualtune, damaged or not.

    `base` is a model directory; its names and shapes decide what the adapter leaves open, and copies of its embedding
    are left out. FormatError with all findings if there is a fault and `repair` is not set, or if there is no single
    right answer.
    """
    directory, findings = adapter_directory(path), list[Finding]()
    config, weights, manifest = open_source(directory, findings)
    # The base comes first, where it is given: its names and shapes decide what the adapter leaves open.
    shapes = base_shapes(base) if base is not None else {}
    notes = tuple[str, ...]()
    if base is not None:
        config, weights, notes = without_copies(config, weights, base, findings)
    repaired, pairs_by_layout = _repair(config, weights, shapes, findings)
    _refuse(directory, findings, repair=True)  # faults without a repair
    # Only a config without open faults can be read strictly; what the matrices say is decided by that reading.
    layout, parts = _agreeing(repaired, weights, pairs_by_layout, shapes, findings)
    pairs = canonical.to_pairs(parts.tensors, directory)
    if not any(pair.B_Or.any() for pair in pairs.values()) and not canonical.extra_tensors(parts.tensors):
        fault = (
            "lora_B is zero in all modules: the adapter does nothing. It was never trained, or its weights were lost"
        )
        findings.append(Finding(fault))
    _refuse(directory, findings, repair=repair)
    if problems := canonical.value_problems(parts.tensors):
        raise FormatError(f"{directory}: {'; '.join(problems[:3])}")
    # The tool that is recognized by its config keys, else the format.
    tools = {"soup": "Soup", "unsloth": "Unsloth", "mlx_tune": "mlx-tune"}
    marked = [tool for mark, tool in tools.items() if any(key.lower().startswith(mark) for key in config)]
    formats = " and ".join({"peft": "PEFT", "mlx": "mlx-lm"}[layout] for layout in weights)
    source, metadata = marked[0] if marked else formats, dict[str, Any](manifest)
    record = {
        "source": source,
        "files": {part.name: sha256_of(part) for w in weights.values() for part in w.parts},
        "fixed": [{"fault": finding.fault, "repair": finding.repair} for finding in findings],
    }
    template = read_template(directory)
    fan_in_fan_out = parts.fan_in_fan_out or (base is not None and is_fan_in_fan_out(config_of(base)))
    adapter = Adapter(
        parts.spec, parts.tensors, parts.base_model, layout, metadata, (*notes, *parts.notes), template=template,
        fan_in_fan_out=fan_in_fan_out,
    )  # fmt: skip
    idle = [module for module, pair in pairs.items() if not pair.B_Or.any()]
    warnings = (
        [f"lora_B is zero in {len(idle)} of {len(pairs)} modules ({idle[0]}, …): they do nothing"] if idle else []
    )
    return ImportedAdapter(adapter, source, tuple(findings), tuple(warnings), {**metadata, "import": record})


def _repair(
    config: dict[str, Any], weights: dict[str, WeightFile], shapes: Shapes, findings: list[Finding]
) -> tuple[dict[str, Any], dict[str, Pairs]]:
    """Return the config after repair, and the pairs of each file under their names in it."""
    layout = "dual" if len(weights) > 1 else next(iter(weights))
    modules = dict.fromkeys(module for w in weights.values() for module, _ in w.halves)
    renamed = diagnose.rename_by_base(modules, shapes, findings)
    config = diagnose.repair_types(diagnose.rename_in_config(config, renamed), findings)
    by_layout, unpaired = dict[str, Pairs](), dict[str, list[str]]()
    for name, w in weights.items():
        by_layout[name], unpaired[name] = _pair_up(w, renamed)
    main = _main_layout(by_layout)
    findings += [Finding(f"{text}. Copy the adapter again") for text in unpaired[main]]
    if not by_layout[main]:
        return config, by_layout  # the strict reader reports the file as it is
    settings = diagnose.scale_settings(config)
    ranks = _ranks(by_layout[main], settings.r or settings.rank)
    if not config.get("rank_pattern") and (None in ranks.values() or not readings(by_layout[main], ranks, shapes)):
        config = diagnose.repair_rank(config, common_rank(by_layout[main]), findings)
    elif settings.r and settings.rank and settings.r != settings.rank and not config.get("rank_pattern"):
        config = diagnose.repair_rank(config, settings.r, findings)
    config = diagnose.repair_scale(config, layout, findings)
    depth = len({p.layer for m in shapes if (p := position_of(m))}) or None
    findings += diagnose.missing_modules(config, by_layout[main], shapes)
    return diagnose.repair_num_layers(config, by_layout[main], depth, findings), by_layout


def _pair_up(weights: WeightFile, renamed: Mapping[str, str]) -> tuple[Pairs, list[str]]:
    """Return the pairs of a file under their right names, and errors about matrices without a partner."""
    pairs, unpaired = Pairs(), list[str]()
    for module in sorted({module for module, _ in weights.halves}):
        A, B = (weights.halves.get((module, part)) for part in "AB")
        if A is None or B is None:
            present, absent = "BA" if A is None else "AB"
            unpaired.append(f"{weights.file.name}: {module}: lora_{present} is there, but lora_{absent} is missing")
        else:
            pairs[renamed.get(module, module)] = Pair(A, B)
    return pairs, unpaired


def _options(config: Mapping[str, Any], pairs: Pairs, shapes: Shapes) -> list[Reading]:
    settings = diagnose.scale_settings(config)
    rank = None if config.get("rank_pattern") else settings.r or settings.rank
    return readings(pairs, _ranks(pairs, rank), shapes)


def _ranks(pairs: Pairs, rank: int | None) -> dict[str, int | None]:
    """Return the rank of each pair: of parameters of experts, that of all experts together."""
    return {module: len(pair.A_rI) if is_mixture(module) else rank for module, pair in pairs.items()}


def _main_layout(by_layout: Mapping[str, Pairs]) -> str:
    """Return the layout of the main file: PEFT's, unless mlx-lm's has more modules."""
    return max(by_layout, key=lambda name: (len(by_layout[name]), name == "peft"))


def _agreeing(
    config: dict[str, Any],
    weights: dict[str, WeightFile],
    by_layout: dict[str, Pairs],
    shapes: Shapes,
    findings: list[Finding],
) -> tuple[str, Parts]:
    """Return (layout, adapter) with the reading of the matrices that fits; with two files, that agrees in both."""
    main = _main_layout(by_layout)
    options = {name: _options(config, pairs, shapes) or [Reading({}, pairs)] for name, pairs in by_layout.items()}
    if len(by_layout) == 1:
        if len(options[main]) > 1:
            findings.append(_ambiguous(weights[main], options[main]))
        _report_changes(weights[main], options[main][0], findings)
        return main, _parse(config, weights[main], options[main][0])
    # With two files every reading of one is compared with every reading of the other.
    [second] = by_layout.keys() - {main}
    if any(not reading.changes for reading in _options(config, by_layout[second], shapes)):
        options[second].append(unscrambled(by_layout[second]))
    candidates, other_candidates = (
        [(reading, _parse(config, weights[name], reading)) for reading in options[name]] for name in (main, second)
    )
    same = [
        pair for pair in product(candidates, other_candidates) if _distance(pair[0][1], pair[1][1]) <= SAME_FUNCTION
    ]
    if not same:
        gap = _distance(candidates[0][1], other_candidates[0][1])
        fault = f"{weights[main].file.name} and {weights[second].file.name} hold different adapters"
        findings.append(Finding(f"{fault}: their updates differ by {gap:.1e} of their norm. Remove the wrong file"))
        return "dual", candidates[0][1]
    (reading, parts), (other_reading, other) = same[0]
    if any(_distance(parts, also) > SAME_FUNCTION for (_, also), _ in same[1:]):
        findings.append(_ambiguous(weights[main], options[main]))
    _report_changes(weights[main], reading, findings)
    _report_changes(weights[second], other_reading, findings)
    if foreign := sorted(other.tensors.keys() - parts.tensors.keys()):
        names = f"{weights[second].file.name} and {weights[main].file.name}"
        fault = f"{names} each lack tensors that the other has ({foreign[0]}, …)"
        findings.append(Finding(f"{fault}. Remove the wrong file"))
    elif lost := sorted(parts.tensors.keys() - other.tensors.keys()):
        fault = f"{weights[second].file.name} lacks {len(lost)} tensors of {weights[main].file.name} ({lost[0]}, …)"
        findings.append(Finding(fault, "writes both from the complete one; the shared tensors agree"))
    return "dual", parts


def _parse(config: dict[str, Any], weights: WeightFile, reading: Reading) -> Parts:
    """Read the matrices with the strict reader of the layout, or of the only tool in the config."""
    is_peft, is_mlx = diagnose.has_peft_keys(config), diagnose.has_mlx_keys(config)
    as_peft = is_peft and (weights.layout == "peft" or not is_mlx)
    tensors: Tensors = dict(weights.foreign)
    for module, (A, B) in reading.pairs.items():
        if as_peft:
            tensors |= {tensor_name(module, "A"): A, tensor_name(module, "B"): B}
        else:
            tensors |= {f"{module}.lora_a": A.T, f"{module}.lora_b": B.T}
    read = peft.read_peft if as_peft else mlx_lm.read_mlx
    return read(config, tensors, weights.file.parent)


def _distance(a: Parts, b: Parts) -> float:
    """Return the largest relative difference of B A, and of what a method trains besides, over the common modules;
    infinite if shapes differ."""
    pairs, others = (canonical.to_pairs(parts.tensors, "adapter") for parts in (a, b))
    gaps = [
        canonical.delta_distance(pairs[m], a.spec.scale_of(m), others[m], b.spec.scale_of(m))
        if pairs[m].delta_shape == others[m].delta_shape
        else np.inf
        for m in pairs.keys() & others.keys()
    ]
    extras, other_extras = (canonical.extra_tensors(parts.tensors) for parts in (a, b))
    shared = extras.keys() & other_extras.keys()
    gaps.append(canonical.extras_distance(*({n: x[n] for n in shared} for x in (extras, other_extras))))
    return float(max(gaps)) if len(gaps) > 1 else np.inf


def _report_changes(weights: WeightFile, reading: Reading, findings: list[Finding]) -> None:
    for change in dict.fromkeys(reading.changes.values()):
        modules = [module for module, done in reading.changes.items() if done == change]
        where = "all modules" if len(modules) == len(reading.pairs) else f"{len(modules)} modules ({modules[0]}, …)"
        findings.append(Finding(f"{weights.file.name}: {change} in {where}", "restores the right orientation"))


def _ambiguous(weights: WeightFile, options: list[Reading]) -> Finding:
    ways = " or ".join(dict.fromkeys(change for option in options for change in option.changes.values()))
    return Finding(
        f"{weights.file.name}: {ways}: the shapes allow both, and the updates differ. Give --base if the model has "
        "layers that are not square; otherwise convert the original adapter again"
    )


def _refuse(directory: Path, findings: list[Finding], *, repair: bool) -> None:
    """Raise FormatError with all findings if one has no repair, or if `repair` is not set."""
    if not findings or (repair and all(finding.repair for finding in findings)):
        return
    lines = [f"{directory}: {len(findings)} fault{'s' if len(findings) > 1 else ''}; nothing is written"]
    for fault, how in findings:
        lines += [f"  {fault}", f"    --repair {how or 'cannot fix it: the directory does not show the right answer'}"]
    lines += ["Run it again with --repair."] if all(finding.repair for finding in findings) else []
    raise FormatError("\n".join(lines))
