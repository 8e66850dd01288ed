"""The difference between two adapters: settings, adapted modules, and updates ΔW = scale · B A.

ΔW is never formed: norms, inner products and differences come from r×r Gram matrices, which resolve a relative
difference down to about 1e-8. Two adapters of different rank, scale or layout can be the same function.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dualtune.adapter.formats.canonical import (
    Pair,
    delta_distance,
    delta_norm,
    extra_tensors,
    extras_distance,
    extras_of,
    to_pairs,
)
from dualtune.adapter.formats.directory import SAME_FUNCTION, Adapter, read_adapter
from dualtune.adapter.spec import Tensors
from dualtune.text.show import in_columns

MAX_ROWS = 12


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """‖ΔW_A − ΔW_B‖ / max(‖ΔW_A‖, ‖ΔW_B‖) of one module, the two norms (Frobenius) and the cosine between them."""

    module: str
    relative_difference: float
    norm_a: float
    norm_b: float
    cosine: float | None  # None if one of them is zero


@dataclass(frozen=True, slots=True)
class AdapterDifference:
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
        _difference(m, pairs[m], ours.spec.scale, others[m], theirs.spec.scale) for m in shared if m not in reshaped
    ]
    extras = [extra_tensors(adapter.tensors) for adapter in (ours, theirs)]
    modules = [_with_extras(found, *(extras_of(found.module, tensors) for tensors in extras)) for found in modules]
    return AdapterDifference(
        settings={k: (x, y) for k, x in _settings(ours).items() if x != (y := _settings(theirs)[k])},
        only_in_a=tuple(sorted(pairs.keys() - others.keys())),
        only_in_b=tuple(sorted(others.keys() - pairs.keys())),
        of_other_shape=reshaped,
        modules=tuple(sorted(modules, key=lambda found: (-found.relative_difference, found.module))),
    )


def render_difference(found: AdapterDifference) -> str:
    """Format the difference as plain text, the largest parts first."""
    lines = [f"{key}: {ours} in A, {theirs} in B" for key, (ours, theirs) in found.settings.items()]
    apart = {"only in A": found.only_in_a, "only in B": found.only_in_b, "different shape": found.of_other_shape}
    for title, names in apart.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines += [f"{title}: {', '.join(names[:3])}{more}"] if names else []
    differing = [m for m in found.modules if m.relative_difference > SAME_FUNCTION]
    if differing:
        rows = [("module", "difference", "‖ΔW‖ of A", "‖ΔW‖ of B", "cosine")]
        rows += [
            (m.module, f"{m.relative_difference:.1e}", f"{m.norm_a:.4g}", f"{m.norm_b:.4g}", _shown(m.cosine))
            for m in differing[:MAX_ROWS]
        ]
        lines += ["", in_columns(rows)]
        lines += [f"and {len(differing) - MAX_ROWS} more modules"] * (len(differing) > MAX_ROWS)
    largest = max((m.relative_difference for m in found.modules), default=0.0)
    verdict = (
        f"same function: no update differs by more than {SAME_FUNCTION:g} of its norm (largest {largest:.1e})"
        if found.is_same_function
        else f"different: {len(differing)} of {len(found.modules)} shared modules (largest difference {largest:.1e})"
    )
    return "\n".join([*lines, verdict])


def _settings(adapter: Adapter) -> dict[str, Any]:
    spec = adapter.spec
    return {
        "method": spec.method,
        "rank": spec.rank,
        "alpha": spec.alpha,
        "scaling": spec.scaling,
        "scale": spec.scale,
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


def _with_extras(found: ModuleDifference, ours: Tensors, theirs: Tensors) -> ModuleDifference:
    """Include the parameters that the method trains in addition to A and B, if they differ more."""
    distance = max(found.relative_difference, extras_distance(ours, theirs))
    return replace(found, relative_difference=distance)


def _inner(ours: Pair, theirs: Pair) -> float:
    """Return ⟨B₁ A₁, B₂ A₂⟩ = Σ (B₁ᵀ B₂) ∘ (A₁ A₂ᵀ), from two r×r matrices in float64."""
    B_rr = ours.B_Or.T.astype(np.float64) @ theirs.B_Or.astype(np.float64)
    return float(np.sum(B_rr * (ours.A_rI.astype(np.float64) @ theirs.A_rI.T.astype(np.float64))))


def _shown(cosine: float | None) -> str:
    return "-" if cosine is None else f"{cosine:.4f}"
