"""`dualtune adapter`: inspect, convert, import, compare and merge adapter directories. Only merge needs a backend."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.cli.options import json_option

LAYOUTS = click.Choice(["dual", "peft", "mlx"])


@click.group("adapter")
def command() -> None:
    """Inspect, convert, import, compare and merge adapter directories."""


@command.command("inspect")
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def inspect_(ctx: click.Context, directory: Path, as_json: bool) -> None:
    """Say what DIRECTORY holds and whether it can be trusted. Exit code 6 if it cannot."""
    import json

    from dualtune.adapter.inspect import inspect_adapter, render_report
    from dualtune.errors import FormatError

    report = inspect_adapter(directory)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else render_report(report))
    ctx.exit(0 if report.ok else FormatError.exit_code)


@command.command("convert")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", "layout", type=LAYOUTS, required=True)
def convert(directory: Path, out: Path, layout: str) -> None:
    """Write the adapter of DIRECTORY to the new directory OUT in another layout; its function stays the same."""
    from dualtune.adapter.directory import read_adapter, write_adapter

    adapter = read_adapter(directory)
    write_adapter(out, adapter, layout=layout)
    for note in adapter.notes:
        click.echo(f"converted: {note}")
    click.echo(f"{out}: written in layout {layout}, read from layout {adapter.layout}")


@command.command("import")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--base", metavar="MODEL", help="The base model: its names and shapes decide what is open without them.")
@click.option("--repair", is_flag=True, help="Mend what has exactly one right answer, and say what was done.")
@click.option("--layout", type=LAYOUTS, default="dual", show_default=True)
@json_option
def import_(directory: Path, out: Path, base: str | None, repair: bool, layout: str, as_json: bool) -> None:
    """Read the adapter of another tool in DIRECTORY, damaged or not, and write it to the new directory OUT.

    Exit code 6, with every fault and what --repair would do, where something is wrong; then nothing is written.
    """
    import json

    from dualtune.adapter.directory import write_adapter
    from dualtune.adapter.repair import import_adapter
    from dualtune.base_model import resolve_model

    found = import_adapter(directory, base=resolve_model(base) if base else None, repair=repair)
    write_adapter(out, found.adapter, layout=layout, metadata=found.metadata)
    if as_json:
        report = {"source": found.source, "out": str(out), "layout": layout, "warnings": found.warnings}
        report |= {"mended": found.metadata["import"]["mended"], "notes": found.adapter.notes}
        click.echo(json.dumps(report, indent=2))
        return
    for fault, mend in found.mended:
        click.echo(f"mended: {fault} -> {mend}")
    for title, texts in (("converted", found.adapter.notes), ("look at", found.warnings)):
        for text in texts:
            click.echo(f"{title}: {text}")
    click.echo(f"{out}: written in layout {layout}, read as an adapter of {found.source}")
