"""`dualtune adapter`: inspect and convert adapter directories. Neither needs a backend."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.cli.options import json_option


@click.group("adapter")
def command() -> None:
    """Inspect and convert adapter directories of PEFT, mlx-lm and dualtune."""


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
@click.option("--to", "layout", type=click.Choice(["dual", "peft", "mlx"]), required=True)
def convert(directory: Path, out: Path, layout: str) -> None:
    """Write the adapter of DIRECTORY to the new directory OUT in another layout; its function stays the same."""
    from dualtune.adapter.directory import read_adapter, write_adapter

    adapter = read_adapter(directory)
    write_adapter(out, adapter, layout=layout)
    for note in adapter.notes:
        click.echo(f"converted: {note}")
    click.echo(f"{out}: written in layout {layout}, read from layout {adapter.layout}")
