"""`dualtune adapter`: inspect, convert, import, compare and merge adapter directories. Only merge needs a backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.errors import FormatError
from dualtune.base.text import in_columns
from dualtune.cli.options import backend_for, directory_name, json_option, other_base_option, platform_option, say_json
from dualtune.cli.program import program, quoted
from dualtune.cli.screen import phases
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.model.adapter import Scaling
    from dualtune.model.inspection import AdapterDifference, AdapterReport

LAYOUTS = click.Choice(["dual", "peft", "mlx", "vllm"])
MAX_ROWS = 12  # modules that differ, in a text
SCALINGS = click.Choice(["standard", "rank_stabilized"])


@click.group("adapter", cls=SuggestingGroup)
def command() -> None:
    """Inspect, convert, import, compare and merge adapter directories."""


@command.command("inspect")
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def inspect_(ctx: click.Context, directory: Path, as_json: bool) -> None:
    """Show what DIRECTORY holds and whether it can be trusted. Exit code 6 if it cannot."""
    from dualtune.model.inspection import inspect_adapter

    report = inspect_adapter(directory)
    if as_json:
        say_json(report.to_json())
    else:
        say(report_text(report))
    ctx.exit(0 if report.ok else FormatError.exit_code)


def report_text(report: AdapterReport) -> str:
    """Return the report as text."""
    from dualtune.model.inspection import shortened

    verdicts = {True: "yes", False: "NO", None: "not applicable"}
    rooted = " (rank-stabilized: alpha / √rank)" if report.scaling == "rank_stabilized" else ""
    lines = [
        f"adapter     {report.path}",
        f"layout      {report.layout}",
        f"base model  {report.base_model or 'not recorded'}",
        f"rank        {report.rank}, alpha {report.alpha:.6g}, scale {report.scale:.6g}{rooted}, "
        f"dropout {report.dropout:g}",
        f"targets     {shortened(report.targets)}",
        f"template    {report.template}",
        f"size        {report.num_modules} modules, {report.num_parameters:,} parameters, "
        f"{sum(report.file_bytes.values()) / 2**20:.1f} MiB in {len(report.file_bytes)} files",
        *(f"beside      {module}: {size:,} parameters" for module, size in report.trained_beside.items()),
        f"hashes ok   {verdicts[report.hashes_ok]}",
        f"files agree {verdicts[report.files_agree]}",
        "",
        f"{'‖scale · B A‖':<28}{'modules':>8}{'mean':>12}{'max':>12}",
        *(f"{p.name:<28}{p.num_modules:>8}{p.mean_norm:>12.4g}{p.max_norm:>12.4g}" for p in report.projections),
    ]
    for title, texts in (("note", report.notes), ("flag", report.flags), ("PROBLEM", report.problems)):
        lines += [f"{title}: {text}" for text in texts]
    return "\n".join(lines)


@command.command("convert")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("out", callback=directory_name, type=click.Path(path_type=Path))
@click.option("--to", "layout", type=LAYOUTS, required=True, help="The layout to write.")
@click.option("--scaling", type=SCALINGS, help="Write the scale as alpha / rank (standard) or alpha / √rank.")
@click.option("--uniform", is_flag=True, help="Write one rank and one scale, for programs that read no patterns.")
def convert(directory: Path, out: Path, layout: str, scaling: Scaling | None, uniform: bool) -> None:
    """Write the adapter of DIRECTORY to the new directory OUT in another layout; its function stays the same."""
    from dualtune.model.adapter import modules_of
    from dualtune.model.formats.canonical import rescaled, unified
    from dualtune.model.formats.directory import read_adapter, write_adapter

    adapter = read_adapter(directory)
    if scaling is not None:
        adapter = replace(adapter, spec=rescaled(adapter.spec, scaling, modules_of(adapter.tensors)))
    if uniform:
        spec, tensors, notes = unified(adapter.spec, adapter.tensors)
        adapter = replace(adapter, spec=spec, tensors=tensors, notes=(*adapter.notes, *notes))
    write_adapter(out, adapter, layout=layout)
    for note in adapter.notes:
        say(f"converted: {note}")
    say(f"{out}: written in layout {layout}, read from layout {adapter.layout}")


@command.command("import")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("out", callback=directory_name, type=click.Path(path_type=Path))
@click.option("--base", metavar="MODEL", help="The base model, whose layers settle what the adapter does not say.")
@click.option("--repair", is_flag=True, help="Repair and report each fault that has exactly one correct repair.")
@click.option("--layout", type=LAYOUTS, default="dual", show_default=True, help="The layout to write.")
@json_option
def import_(directory: Path, out: Path, base: str | None, repair: bool, layout: str, as_json: bool) -> None:
    """Read the adapter of another tool in DIRECTORY, damaged or not, and write it to the new directory OUT.

    Exit code 6 if there is a fault: each one is listed with what --repair would do, and nothing is written.
    """
    from dualtune.base.fields import shown
    from dualtune.model.base_model import is_elsewhere, plain_name, resolve_model
    from dualtune.model.formats.directory import write_adapter
    from dualtune.model.importing.repair import import_adapter

    imported = import_adapter(directory, base=resolve_model(base) if base else None, repair=repair)
    adapter, warnings = imported.adapter, [*imported.warnings]
    # The name of a base that this machine does not have would be found only when the adapter is loaded.
    name = adapter.base_model
    if name is not None and (is_elsewhere(name) or plain_name(name) != name):
        description = "a path of another machine" if is_elsewhere(name) else "a copy in few bits"
        if base:
            adapter = replace(adapter, base_model=base)
        remedy = (
            f"{base} is written instead"
            if base
            else "give the plain model with --base MODEL, to write its name instead"
        )
        warnings.append(f"the adapter names its base as {shown(name)}, {description}: {remedy}")
    # A fault that was not repaired has ended the command above, so what is written is sound.
    write_adapter(out, adapter, layout=layout, metadata=imported.metadata)
    if as_json:
        report = {"source": imported.source, "out": str(out), "layout": layout, "warnings": warnings}
        fixed = imported.metadata["import"]["fixed"]
        report |= {"fixed": fixed, "mended": fixed, "notes": imported.adapter.notes}  # `mended`: the old name
        say_json(report)
        return
    for fault, how in imported.repaired:
        say(f"repaired: {fault} -> {how}")
    for title, texts in (("converted", imported.adapter.notes), ("warning", warnings)):
        for text in texts:
            say(f"{title}: {text}")
    say(f"{out}: written in layout {layout}, read as an adapter of {imported.source}")


@command.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def diff(ctx: click.Context, a: Path, b: Path, as_json: bool) -> None:
    """Compare the adapters of directories A and B. Exit code 0: the same function (to 1e-5); 1: not the same."""
    from dualtune.model.inspection import diff_adapters

    difference = diff_adapters(a, b)
    if as_json:
        say_json(difference.to_json())
    else:
        say(difference_text(difference))
    ctx.exit(0 if difference.is_same_function else 1)


def difference_text(difference: AdapterDifference) -> str:
    """Return the difference as text, the largest parts first."""
    from dualtune.model.formats.directory import SAME_FUNCTION

    lines = [f"{key}: {ours} in A, {theirs} in B" for key, (ours, theirs) in difference.settings.items()]
    apart = {
        "only in A": difference.only_in_a,
        "only in B": difference.only_in_b,
        "different shape": difference.of_other_shape,
    }
    for title, names in apart.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines += [f"{title}: {', '.join(names[:3])}{more}"] if names else []
    differing = [m for m in difference.modules if m.relative_difference > SAME_FUNCTION]
    if differing:
        rows = [("module", "difference", "‖ΔW‖ of A", "‖ΔW‖ of B", "cosine")]
        for m in differing[:MAX_ROWS]:
            cosine = "-" if m.cosine is None else f"{m.cosine:.4f}"
            rows.append((m.module, f"{m.relative_difference:.1e}", f"{m.norm_a:.4g}", f"{m.norm_b:.4g}", cosine))
        lines += ["", in_columns(rows)]
        lines += [f"and {len(differing) - MAX_ROWS} more modules"] * (len(differing) > MAX_ROWS)
    num_shared, largest = len(difference.modules), max((m.relative_difference for m in difference.modules), default=0.0)
    verdict = (
        f"same function: no update differs by more than {SAME_FUNCTION:g} of its norm (largest {largest:.1e})"
        if difference.is_same_function
        else f"different: {len(differing)} of {num_shared} shared modules (largest difference {largest:.1e})"
    )
    return "\n".join([*lines, verdict])


@command.command("merge")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("out", callback=directory_name, type=click.Path(path_type=Path))
@click.option("--base", metavar="MODEL", required=True, help="The plain base model: a directory or a hub id.")
@other_base_option
@platform_option
@interrupt.handled(interrupt.TERMINATION, error=interrupt.Abandoned)
def merge(directory: Path, out: Path, base: str, other_base: bool, platform: str) -> None:
    """Write MODEL with the adapter of DIRECTORY added to its weights to the new directory OUT.

    OUT is a Hugging Face model in the stored precision of MODEL, with the chat template of the training. A quantized
    MODEL is refused: rounding its weights again would erase what the adapter adds. Merge into the plain model instead,
    and quantize the result.
    """
    from dualtune.data.tokens.new_tokens import with_new_tokens
    from dualtune.model.adapter import modules_of
    from dualtune.model.base_model import resolve_model
    from dualtune.model.beside import sizes_of
    from dualtune.model.formats.directory import read_adapter
    from dualtune.use.export.merge import check_base, check_free, load_to_merge, note_of_base, write_merged

    check_free(out)
    with phases() as shown:
        shown.begin("reading", "the adapter")
        adapter = read_adapter(directory)
        model_dir = with_new_tokens(resolve_model(base), adapter.new_tokens)
        if not other_base:
            check_base(adapter, model_dir)
        backend = backend_for(platform)
        shown.begin("loading", "the model")
        engine = load_to_merge(adapter, model_dir, backend)
        shown.finish("loaded")
        shown.begin("writing", "the merged model")
        write_merged(engine, adapter, out, shown.tell)
    if note := note_of_base(adapter):
        say(note)
    trained = "".join(f", and {module} as trained" for module in sizes_of(engine.adapter_shapes) or ())
    merged = f"{len(modules_of(adapter.tensors))} modules merged{trained}"
    say(f"{out}: {base} with {merged}, in {engine.description.dtype}")
    say(f"next        {program()} chat {quoted(out)}")
