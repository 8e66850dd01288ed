"""The arithmetic of converting adapters: pairs of matrices, one rank and one scale for all, an integer alpha.

The update of a module is ΔW = scale · B A. All functions here preserve ΔW: padding with zeros adds nothing to the
product, and a factor taken out of the scale is multiplied into B, in float64 and rounded once. Shape suffixes: r rank,
I in, O out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dualtune.base.errors import FormatError
from dualtune.model.adapter import (
    AdapterSpec,
    Scaling,
    Tensors,
    divisor,
    is_module_path,
    is_of_base,
    modules_of,
    parse_name,
    pattern_of,
    tensor_name,
)
from dualtune.model.methods.method import Method
from dualtune.model.targets import value_of

PAIR = "AB"  # the parts that form a low-rank update
ALPHA_RELATIVE_ERROR = 1e-12  # scale · rank differs from the original alpha by a few 1e-16


class Pair(NamedTuple):
    """The two matrices of one adapted module."""

    A_rI: np.ndarray
    B_Or: np.ndarray

    @property
    def delta_shape(self) -> tuple[int, int]:
        return self.B_Or.shape[0], self.A_rI.shape[1]


Pairs = dict[str, Pair]  # by module path


class Parts(NamedTuple):
    """The contents of another tool's files, in canonical form."""

    spec: AdapterSpec
    tensors: Tensors
    base_model: str | None
    notes: tuple[str, ...]
    fan_in_fan_out: bool = False  # see `dualtune.model.formats.naming`


def pair_up(halves: Mapping[tuple[str, str], np.ndarray], where: object) -> Pairs:
    """Return pairs from (module, "A" or "B") -> lora_A [r, in] or lora_B [out, r]; checks partners and ranks."""
    if not halves:
        raise FormatError(f"{where}: holds no LoRA tensors")
    pairs: Pairs = {}
    for module in sorted({module for module, _ in halves}):
        if not is_module_path(module):
            raise FormatError(f"{where}: {module[:200]!r} is not a module path")
        for part, partner in ("AB", "BA"):
            if (module, part) not in halves:
                raise FormatError(f"{where}: {module}: lora_{partner} is there, but lora_{part} is missing")
        pair = Pair(halves[module, "A"], halves[module, "B"])
        if not (pair.A_rI.ndim == pair.B_Or.ndim == 2):
            raise FormatError(
                f"{where}: {module}: got shapes {pair.A_rI.shape} and {pair.B_Or.shape}, must be matrices. "
                "Only layers of experts are read as stacks"
            )
        pairs[module] = pair
    return pairs


def check_rank(module: str, pair: Pair, rank: int, where: object) -> None:
    """Check A [rank, in] and B [out, rank]; the error names the usual mistake that fits."""
    (rows, in_dim), (out_dim, columns) = pair.A_rI.shape, pair.B_Or.shape
    if rows == columns == rank and in_dim and out_dim:
        return
    hint = " They look transposed." if in_dim == out_dim == rank else ""
    raise FormatError(
        f"{where}: {module}: lora_A {[rows, in_dim]} and lora_B {[out_dim, columns]}, "
        f"must be [{rank}, in] and [out, {rank}].{hint}"
    )


def unified(spec: AdapterSpec, tensors: Tensors) -> tuple[AdapterSpec, Tensors, list[str]]:
    """Return the same function with one rank and one scale for all, for formats that hold no others, and notes."""
    if not (spec.rank_pattern or spec.alpha_pattern):
        return spec, tensors, []
    pairs = to_pairs(tensors, "adapter")
    alike, scale, notes = unify(pairs, {module: spec.scale_of(module) for module in pairs})
    rank = max(pair.A_rI.shape[0] for pair in alike.values())
    uniform = replace(spec, rank=rank, alpha=alpha_of(scale, rank, spec.scaling), rank_pattern=(), alpha_pattern=())
    return uniform, to_tensors(alike) | extra_tensors(tensors), notes


def unify(pairs: Pairs, scales: Mapping[str, float]) -> tuple[Pairs, float, list[str]]:
    """Return the same updates with one rank and one scale for all: (pairs, scale, notes).

    The scale is the most common one, so that most modules keep their numbers.
    """
    ranks = {pair.A_rI.shape[0] for pair in pairs.values()}
    rank = max(ranks)
    scale = Counter(scales.values()).most_common(1)[0][0]
    notes: list[str] = []
    if len(ranks) > 1:
        notes.append(f"rank pattern: ranks {', '.join(map(str, sorted(ranks)))} zero-padded to {rank}")
    if changed := sum(s != scale for s in scales.values()):
        notes.append(f"scale pattern: lora_B of {changed} modules multiplied, so that scale {scale:.6g} holds for all")
    unified = {
        module: Pair(pad(pair.A_rI, rank, axis=0), fold(pad(pair.B_Or, rank, axis=1), scales[module] / scale))
        for module, pair in pairs.items()
    }
    return unified, scale, notes


def pad(x: np.ndarray, rank: int, *, axis: int) -> np.ndarray:
    """Append zero rows or columns to the matrix, up to `rank`."""
    missing = rank - x.shape[axis]
    return np.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


def fold(B_Or: np.ndarray, factor: float) -> np.ndarray:
    if factor == 1.0:
        return B_Or
    with np.errstate(over="ignore"):  # Inf is reported later
        return (B_Or.astype(np.float64) * factor).astype(np.float32)


def alpha_of(scale: float, rank: int, scaling: Scaling = "standard") -> float:
    """Return scale · rank (or · √rank), corrected for the rounding of alpha / rank · rank."""
    alpha = scale * divisor(rank, scaling)
    return float(round(alpha)) if math.isclose(alpha, round(alpha), rel_tol=ALPHA_RELATIVE_ERROR) else alpha


def rescaled(spec: AdapterSpec, scaling: Scaling, modules: Iterable[str]) -> AdapterSpec:
    """Return the same scale of these modules as alpha / rank or alpha / √rank."""
    if scaling == spec.scaling:
        return spec
    alpha = alpha_of(spec.scale, spec.rank, scaling)
    alphas = {module: alpha_of(spec.scale_of(module), spec.rank_of(module), scaling) for module in modules}
    return replace(spec, alpha=alpha, scaling=scaling, alpha_pattern=pattern_of(alphas, alpha))


def integral_alpha(scale: float, rank: int, scaling: Scaling = "standard") -> tuple[int, float]:
    """Return an integer alpha >= 1 and a factor with alpha / rank (or / √rank) · factor = scale.

    The factor is to be multiplied into B. Readers of PEFT directories declare lora_alpha an integer, and some refuse
    `16.0`.
    """
    alpha = alpha_of(scale, rank, scaling)
    nearest = max(1, round(alpha))
    return nearest, alpha / nearest


def with_integral_alpha(spec: AdapterSpec, tensors: Tensors) -> tuple[AdapterSpec, Tensors, list[str]]:
    """Return the same function with an integer alpha, and a note if lora_B was rescaled for it.

    Those of the pattern stay: its readers take any number.
    """
    alpha, factor = integral_alpha(spec.scale, spec.rank, spec.scaling)
    notes: list[str] = []
    if factor != 1.0:
        by_default = {m for m in modules_of(tensors) if not value_of(m, spec.alpha_pattern, 0.0)}
        of_B = {tensor_name(module, "B") for module in by_default}
        tensors = {name: fold(x, factor) if name in of_B else x for name, x in tensors.items()}
        notes.append(f"alpha {spec.alpha:.6g} is not an integer: written as {alpha}, lora_B multiplied by {factor:.9g}")
    return replace(spec, alpha=float(alpha)), tensors, notes


def to_tensors(pairs: Pairs) -> Tensors:
    """Return the tensors under canonical names, float32, contiguous."""
    tensors: Tensors = {}
    for module, pair in pairs.items():
        tensors[tensor_name(module, "A")] = np.ascontiguousarray(pair.A_rI, np.float32)
        tensors[tensor_name(module, "B")] = np.ascontiguousarray(pair.B_Or, np.float32)
    return tensors


def to_pairs(tensors: Tensors, where: object) -> Pairs:
    """Return the pairs of canonical tensors, without parameters of the base; FormatError for another name."""
    halves: dict[tuple[str, str], np.ndarray] = {}
    for name, tensor in tensors.items():
        if is_of_base(name):
            continue
        if (parsed := parse_name(name)) is None:
            raise FormatError(f"{where}: tensor {name[:200]!r} does not belong to a LoRA adapter")
        if parsed[1] in PAIR:
            halves[parsed] = tensor
    return pair_up(halves, where)


def extra_tensors(tensors: Tensors) -> Tensors:
    """Return the parameters that the method trains in addition to A and B (LoRA: none), by canonical name, float32."""
    parsed = {name: parse_name(name) for name in tensors}
    names = [name for name, place in parsed.items() if place and place[1] not in PAIR]
    return {name: np.ascontiguousarray(tensors[name], np.float32) for name in names}


def of_base(tensors: Tensors) -> Tensors:
    """Return the parameters of the base, which are trained beside the adapter, by canonical name, float32."""
    return {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items() if is_of_base(name)}


def extras_of(module: str, extras: Tensors) -> Tensors:
    """Return the tensors of one module."""
    return {name: x for name, x in extras.items() if (parsed := parse_name(name)) and parsed[0] == module}


def check_extras(method: Method, extras: Tensors, pairs: Pairs, where: object) -> None:
    """Raise FormatError unless each module has the method's parameters other than A and B, in the right shape."""
    expected = {
        tensor_name(module, part, method.name): shape
        for module, pair in pairs.items()
        for part, shape in method.shapes(pair.delta_shape, pair.A_rI.shape[0]).items()
        if part not in PAIR
    }
    for name in sorted(expected.keys() | extras.keys()):
        if name not in extras:
            raise FormatError(f"{where}: tensor {name!r} is missing; {method.title} needs it. Copy the file again")
        if name not in expected:
            raise FormatError(f"{where}: tensor {name!r} is not part of {method.title}")
        if extras[name].shape != expected[name]:
            raise FormatError(f"{where}: {name}: got shape {[*extras[name].shape]}, must be {[*expected[name]]}")


def extras_distance(a: Tensors, b: Tensors) -> float:
    """Return the largest relative difference of the tensors other than A and B; 1 if only one adapter has a tensor."""
    if a.keys() != b.keys():
        return 1.0
    sizes = {name: max(np.linalg.norm(x), np.linalg.norm(b[name])) for name, x in a.items()}
    return max((float(np.linalg.norm(a[n] - b[n]) / size) for n, size in sizes.items() if size), default=0.0)


def value_problems(tensors: Tensors) -> list[str]:
    """Return problems in well-formed tensors: NaN and Inf, and modules filled with zeros."""
    return [
        *(f"{name} holds NaN or Inf" for name in non_finite(tensors)),
        *(f"{module}: A and B are all zeros, as after an interrupted write" for module in zero_filled(tensors)),
    ]


def non_finite(tensors: Tensors) -> list[str]:
    """Return the names of the tensors with NaN or Inf."""
    return [name for name, x in tensors.items() if not np.isfinite(x).all()]


def zero_filled(tensors: Tensors) -> list[str]:
    """Return the modules with A = B = 0. A fresh adapter has B = 0; with A = 0 too, both gradients stay zero."""
    pairs = to_pairs(tensors, "adapter")
    return [module for module, pair in pairs.items() if not (pair.A_rI.any() or pair.B_Or.any())]


def delta_norm(pair: Pair, scale: float) -> float:
    """Return ‖scale · B A‖ (Frobenius) from two r×r Gram matrices: ‖B A‖² = Σ (BᵀB) ∘ (A Aᵀ), without forming B A."""
    A_rI, B_Or = pair.A_rI.astype(np.float64), pair.B_Or.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged adapter gives NaN or Inf
        square = np.sum((B_Or.T @ B_Or) * (A_rI @ A_rI.T))
    return abs(scale) * float(np.sqrt(np.maximum(square, 0.0)))  # rounding may give −1e-20; NaN stays NaN


def delta_distance(a: Pair, scale_a: float, b: Pair, scale_b: float) -> float:
    """Return ‖ΔW₁ − ΔW₂‖ / max(‖ΔW₁‖, ‖ΔW₂‖), exact to about 1e-8: the difference is a product of stacked factors."""
    A_rI = np.concatenate([a.A_rI, b.A_rI])
    B_Or = np.concatenate([np.float64(scale_a) * a.B_Or, np.float64(-scale_b) * b.B_Or], axis=1)
    size = max(delta_norm(a, scale_a), delta_norm(b, scale_b))
    return delta_norm(Pair(A_rI, B_Or), 1.0) / size if size else 0.0
