"""`dualtune report`: runs as one page for a browser."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--open", "opens", is_flag=True, help="Also open the page in the browser.")
@click.option(
    "--output", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="Where the page is written. Default: report.html in RUN, or in the directory that holds all of them.",
)  # fmt: skip
def command(runs: tuple[Path, ...], opens: bool, output: Path | None) -> None:
    """Write the run directories RUN as one page: verdict, curves, answers, data, how to repeat it, what to do next.

    Several runs are drawn over each other, with a table of the keys that differ and their losses over each of these
    keys. A directory of runs stands for all of them. The page is one file that loads nothing. A run writes its own page
    at its end, unless run.report is false.
    """
    import webbrowser

    from dualtune.cli.output.terminal import say
    from dualtune.errors import EnvironmentFault
    from dualtune.io.disk import write_file
    from dualtune.report.run_page import run_page
    from dualtune.train.state.run_dir import REPORT

    found = {run.resolve(): run for given in runs for run in _runs_in(given)}
    page = run_page([*found.values()])
    common = runs[0] if len(runs) == 1 else Path(os.path.commonpath([run.resolve() for run in runs]))
    target = output or common / REPORT
    write_file(target, page)
    say(f"report      {target}")
    if opens and not webbrowser.open(target.resolve().as_uri()):
        raise EnvironmentFault(f"{target}: no browser was found to open it. Open the file yourself")


def _runs_in(given: Path) -> list[Path]:
    """Return a run directory, or those in a directory that holds some."""
    from dualtune.train.state.listing import find_runs
    from dualtune.train.state.run_dir import is_run_dir

    return [given] if is_run_dir(given) or not given.is_dir() else find_runs(given) or [given]
