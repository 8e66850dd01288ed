"""The report of `dualtune inspect`: the contents of an adapter directory, and its problems."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from dualtune.adapter.formats import canonical
from dualtune.adapter.formats.chat_template import describe_template
from dualtune.adapter.formats.directory import FILES, Adapter, agreement_problems, load, open_directory
from dualtune.adapter.formats.manifest import MANIFEST_FILE, integrity_problems
from dualtune.adapter.layers import position_of

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
    path: str
    layout: str
    base_model: str | None
    rank: int
    alpha: float
    scale: float
    method: str
    scaling: str  # standard: scale = alpha / rank; rank_stabilized: alpha / √rank
    dropout: float
    targets: tuple[str, ...]
    template: str  # of the adapter's training
    num_modules: int
    num_parameters: int
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
    contents = open_directory(path)
    changed = (
        integrity_problems(contents.directory, contents.manifest, FILES) if contents.manifest is not None else None
    )
    adapter = load(contents)
    disagreements = agreement_problems(contents, adapter) if contents.layout == "dual" else None
    spec, pairs = adapter.spec, canonical.to_pairs(adapter.tensors, contents.directory)
    names = [name for name in (*FILES, MANIFEST_FILE) if (contents.directory / name).is_file()]
    return AdapterReport(
        path=str(contents.directory),
        layout=contents.layout,
        base_model=adapter.base_model,
        rank=spec.rank,
        alpha=spec.alpha,
        scale=spec.scale,
        method=spec.method,
        scaling=spec.scaling,
        dropout=spec.dropout,
        targets=spec.targets,
        template=describe_template(adapter.template, adapter.metadata),
        num_modules=len(pairs),
        num_parameters=sum(x.size for x in adapter.tensors.values()),
        file_bytes={name: (contents.directory / name).stat().st_size for name in names},
        projections=_projections(pairs, spec.scale),
        notes=(*adapter.notes, *adapter.naming.notes),
        flags=tuple(_flags(adapter, pairs)),
        problems=(*(changed or ()), *canonical.value_problems(adapter.tensors), *(disagreements or ())),
        hashes_ok=None if changed is None else not changed,
        files_agree=None if disagreements is None else not disagreements,
    )


def render_report(report: AdapterReport) -> str:
    """Format the report as plain text."""
    verdicts = {True: "yes", False: "NO", None: "not applicable"}
    lines = [
        f"adapter     {report.path}",
        f"layout      {report.layout}",
        f"base model  {report.base_model or 'not recorded'}",
        f"rank        {report.rank}, alpha {report.alpha:.6g}, scale {report.scale:.6g}{_scaling_note(report)}, "
        f"dropout {report.dropout:g}",
        f"targets     {_shortened(report.targets)}",
        f"template    {report.template}",
        f"size        {report.num_modules} modules, {report.num_parameters:,} parameters, "
        f"{sum(report.file_bytes.values()) / 2**20:.1f} MiB in {len(report.file_bytes)} files",
        f"hashes ok   {verdicts[report.hashes_ok]}",
        f"files agree {verdicts[report.files_agree]}",
        "",
        f"{'‖scale · B A‖':<28}{'modules':>8}{'mean':>12}{'max':>12}",
        *(f"{p.name:<28}{p.num_modules:>8}{p.mean_norm:>12.4g}{p.max_norm:>12.4g}" for p in report.projections),
    ]
    for title, texts in (("note", report.notes), ("flag", report.flags), ("PROBLEM", report.problems)):
        lines += [f"{title}: {text}" for text in texts]
    return "\n".join(lines)


def _scaling_note(report: AdapterReport) -> str:
    return " (rank-stabilized: alpha / √rank)" if report.scaling == "rank_stabilized" else ""


def _projections(pairs: canonical.Pairs, scale: float) -> tuple[ProjectionNorms, ...]:
    norms: dict[str, list[float]] = defaultdict(list)
    for module, pair in pairs.items():
        position = position_of(module)
        norms[position.name if position else module].append(canonical.delta_norm(pair, scale))
    return tuple(ProjectionNorms(name, len(n), sum(n) / len(n), max(n)) for name, n in sorted(norms.items()))


def _flags(adapter: Adapter, pairs: canonical.Pairs) -> list[str]:
    spec, flags = adapter.spec, list[str]()
    idle = [module for module, pair in pairs.items() if not pair.B_Or.any()]
    if len(idle) == len(pairs):
        flags.append("B is all zeros (the adapter does nothing)")
    elif idle:
        flags.append(f"B is all zeros in {len(idle)} of {len(pairs)} modules (they do nothing): {_shortened(idle)}")
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


def _shortened(names: tuple[str, ...] | list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
