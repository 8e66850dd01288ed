"""What `dualtune inspect` reports of an adapter directory, and `dualtune adapter diff` of two."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dualtune.model.adapter import Tensors, is_of_base
from dualtune.model.beside import PREFIX, ROWS, sizes_of
from dualtune.model.formats import canonical
from dualtune.model.formats.canonical import (
    Pair,
    delta_distance,
    delta_norm,
    extra_tensors,
    extras_distance,
    extras_of,
    to_pairs,
)
from dualtune.model.formats.chat_template import describe_template
from dualtune.model.formats.directory import (
    FILES,
    MANIFEST_FILE,
    SAME_FUNCTION,
    Adapter,
    agreement_problems,
    integrity_problems,
    load,
    open_directory,
    read_adapter,
)
from dualtune.model.targets import position_of

# ----------------------------------------------------------------------------------------------------------------------
# The difference between two adapters: settings, adapted modules, and updates ΔW = scale · B A.
#
# ΔW is never formed: norms, inner products and differences come from r×r Gram matrices, which resolve a relative
# difference down to about 1e-8. Two adapters of different rank, scale or layout can be the same function.


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """‖ΔW_A − ΔW_B‖ / max(‖ΔW_A‖, ‖ΔW_B‖) of one module, the two norms (Frobenius) and the cosine between them.

    Of a parameter of the base that is trained beside the adapter: the same of its values, under its own name.
    """

    module: str
    relative_difference: float
    norm_a: float
    norm_b: float
    cosine: float | None  # None if one of them is zero


@dataclass(frozen=True, slots=True)
class AdapterDifference:
    """How two adapters differ."""

    settings: dict[str, tuple[Any, Any]]  # rank, alpha, … -> (of A, of B), where they differ
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    of_other_shape: tuple[str, ...]
    modules: tuple[ModuleDifference, ...]  # in both adapters, the most different first

    @property
    def is_same_function(self) -> bool:
        apart = self.only_in_a or self.only_in_b or self.of_other_shape
        return not apart and all(module.relative_difference <= SAME_FUNCTION for module in self.modules)

    def to_json(self) -> dict[str, Any]:
        return {"same_function": self.is_same_function, **asdict(self)}


def diff_adapters(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> AdapterDifference:
    """Compare two adapter directories of any layout."""
    ours, theirs = read_adapter(a), read_adapter(b)
    pairs, others = to_pairs(ours.tensors, a), to_pairs(theirs.tensors, b)
    shared = sorted(pairs.keys() & others.keys())
    reshaped = tuple(m for m in shared if pairs[m].delta_shape != others[m].delta_shape)
    modules = [
        _difference(m, pairs[m], ours.spec.scale_of(m), others[m], theirs.spec.scale_of(m))
        for m in shared
        if m not in reshaped
    ]
    extras = [extra_tensors(adapter.tensors) for adapter in (ours, theirs)]
    modules = [
        _with_extras(difference, *(extras_of(difference.module, tensors) for tensors in extras))
        for difference in modules
    ]
    beside, other = _of_base(ours), _of_base(theirs)
    both = sorted(beside.keys() & other.keys())
    resized = tuple(name for name in both if beside[name].shape != other[name].shape)
    modules += [_difference_of_values(n, beside[n], other[n]) for n in both if n not in resized]
    return AdapterDifference(
        settings={k: (x, y) for k, x in _settings(ours).items() if x != (y := _settings(theirs)[k])},
        only_in_a=tuple(sorted((pairs.keys() | beside.keys()) - others.keys() - other.keys())),
        only_in_b=tuple(sorted((others.keys() | other.keys()) - pairs.keys() - beside.keys())),
        of_other_shape=reshaped + resized,
        modules=tuple(sorted(modules, key=lambda difference: (-difference.relative_difference, difference.module))),
    )


def _of_base(adapter: Adapter) -> Tensors:
    """Return the parameters of the base, by names that tell rows of some tokens from those of others."""
    rows = ", ".join(map(str, adapter.spec.beside.rows))
    names = {name: name.removeprefix(PREFIX) for name in filter(is_of_base, adapter.tensors)}
    return {f"{short} of {rows}" if short.endswith(ROWS) else short: adapter.tensors[n] for n, short in names.items()}


def _settings(adapter: Adapter) -> dict[str, Any]:
    spec = adapter.spec
    return {
        "method": spec.method,
        "rank": spec.rank,
        "alpha": spec.alpha,
        "scaling": spec.scaling,
        "scale": spec.scale,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": dict(spec.alpha_pattern),
        "dropout": spec.dropout,
        "targets": tuple(sorted(spec.targets)),
        "base model": adapter.base_model,
    }


def _difference(module: str, ours: Pair, our_scale: float, theirs: Pair, their_scale: float) -> ModuleDifference:
    norm_a, norm_b = delta_norm(ours, our_scale), delta_norm(theirs, their_scale)
    cosine = None
    if norm_a and norm_b:
        cosine = max(-1.0, min(1.0, our_scale * their_scale * _inner(ours, theirs) / (norm_a * norm_b)))
    distance = delta_distance(ours, our_scale, theirs, their_scale)
    return ModuleDifference(module, distance, norm_a, norm_b, cosine)


def _difference_of_values(name: str, ours: np.ndarray, theirs: np.ndarray) -> ModuleDifference:
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    largest = max(norm_a, norm_b)
    cosine = max(-1.0, min(1.0, float(a @ b) / (norm_a * norm_b))) if norm_a and norm_b else None
    distance = float(np.linalg.norm(a - b)) / largest if largest else 0.0
    return ModuleDifference(name, distance, norm_a, norm_b, cosine)


def _with_extras(difference: ModuleDifference, ours: Tensors, theirs: Tensors) -> ModuleDifference:
    """Include the parameters that the method trains in addition to A and B, if they differ more."""
    distance = max(difference.relative_difference, extras_distance(ours, theirs))
    return replace(difference, relative_difference=distance)


def _inner(ours: Pair, theirs: Pair) -> float:
    """Return ⟨B₁ A₁, B₂ A₂⟩ = Σ (B₁ᵀ B₂) ∘ (A₁ A₂ᵀ), from two r×r matrices in float64."""
    B_rr = ours.B_Or.T.astype(np.float64) @ theirs.B_Or.astype(np.float64)
    return float(np.sum(B_rr * (ours.A_rI.astype(np.float64) @ theirs.A_rI.T.astype(np.float64))))


# ----------------------------------------------------------------------------------------------------------------------
# The contents of one directory, and its problems.

MLX_DEFAULT_SCALE = 20.0


@dataclass(frozen=True, slots=True)
class ProjectionNorms:
    """‖scale · B A‖ (Frobenius) over the modules of one layer-relative name."""

    name: str  # self_attn.q_proj
    num_modules: int
    mean_norm: float
    max_norm: float


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """The facts of an adapter directory, as `dualtune adapter inspect` shows them."""

    path: str
    layout: str
    base_model: str | None
    rank: int
    alpha: float
    scale: float
    rank_pattern: dict[str, int]  # of modules with another rank or alpha
    alpha_pattern: dict[str, float]
    method: str
    scaling: str  # standard: scale = alpha / rank; rank_stabilized: alpha / √rank
    dropout: float
    targets: tuple[str, ...]
    template: str  # of the adapter's training
    num_modules: int
    num_parameters: int
    trained_beside: dict[str, int]  # how many parameters of the base, by module
    file_bytes: dict[str, int]
    projections: tuple[ProjectionNorms, ...]
    notes: tuple[str, ...]  # what had to be converted, and what other tools cannot load
    flags: tuple[str, ...]  # suspicious, but readable
    problems: tuple[str, ...]  # why `read_adapter` refuses the directory
    hashes_ok: bool | None  # None without dualtune.json
    files_agree: bool | None  # None without a second weight file

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; a norm that is not finite becomes null."""
        plain = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return {**plain, "ok": self.ok}


def inspect_adapter(path: str | os.PathLike[str]) -> AdapterReport:
    """Read the whole directory, and report what `read_adapter` would refuse instead of raising, if possible.

    FormatError only for what cannot be read as an adapter at all.
    """
    with open_directory(path) as contents:
        directory, manifest = contents.directory, contents.manifest
        changes = None if manifest is None else integrity_problems(directory, manifest, contents.files)
        adapter = load(contents)
        disagreements = agreement_problems(contents, adapter) if contents.layout == "dual" else None
    spec, pairs = adapter.spec, canonical.to_pairs(adapter.tensors, directory)
    names = [name for name in (*FILES, MANIFEST_FILE) if (directory / name).is_file()]
    return AdapterReport(
        path=str(directory),
        layout=adapter.layout,
        base_model=adapter.base_model,
        rank=spec.rank,
        alpha=spec.alpha,
        scale=spec.scale,
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern=dict(spec.alpha_pattern),
        method=spec.method,
        scaling=spec.scaling,
        dropout=spec.dropout,
        targets=spec.targets,
        template=describe_template(adapter.template, adapter.metadata),
        num_modules=len(pairs),
        num_parameters=sum(x.size for x in adapter.tensors.values()),
        trained_beside=sizes_of({name: x.shape for name, x in adapter.tensors.items()}) or {},
        file_bytes={name: (directory / name).stat().st_size for name in names},
        projections=_projections(pairs, spec.scale_of),
        notes=(*adapter.notes, *adapter.naming.notes),
        flags=tuple(_flags(adapter, pairs)),
        problems=(*(changes or ()), *canonical.value_problems(adapter.tensors), *(disagreements or ())),
        hashes_ok=None if changes is None else not changes,
        files_agree=None if disagreements is None else not disagreements,
    )


def _projections(pairs: canonical.Pairs, scale_of: Callable[[str], float]) -> tuple[ProjectionNorms, ...]:
    norms: dict[str, list[float]] = defaultdict(list)
    for module, pair in pairs.items():
        position = position_of(module)
        norms[position.name if position else module].append(canonical.delta_norm(pair, scale_of(module)))
    return tuple(ProjectionNorms(name, len(n), sum(n) / len(n), max(n)) for name, n in sorted(norms.items()))


def _flags(adapter: Adapter, pairs: canonical.Pairs) -> list[str]:
    spec, flags = adapter.spec, list[str]()
    idle = [module for module, pair in pairs.items() if not pair.B_Or.any()]
    if idle and extra_tensors(adapter.tensors):
        flags.append(f"B is all zeros in {len(idle)} of {len(pairs)} modules: {shortened(idle)}")
    elif len(idle) == len(pairs):
        flags.append("B is all zeros (the adapter does nothing)")
    elif idle:
        flags.append(f"B is all zeros in {len(idle)} of {len(pairs)} modules (they do nothing): {shortened(idle)}")
    # The two usual mistakes of converters between scale and alpha; only hints, since both values can be intended.
    if adapter.layout != "mlx" and spec.alpha == MLX_DEFAULT_SCALE and spec.scaling == "standard":
        flags.append(
            f"alpha is 20, which is mlx-lm's default scale: if it was meant as scale, alpha must be 20 · {spec.rank}"
        )
    if adapter.layout == "mlx" and spec.scale != MLX_DEFAULT_SCALE and spec.scale >= max(spec.rank, 8):
        flags.append(
            f"scale is {spec.scale:g} at rank {spec.rank}: mlx-lm multiplies by it directly. "
            f"If it was meant as alpha, scale must be {spec.scale / spec.rank:g}"
        )
    return flags


def shortened(names: tuple[str, ...] | list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
