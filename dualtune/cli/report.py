"""`dualtune report`: runs as one page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dualtune.base.errors import EnvironmentFault
from dualtune.base.files import write_file


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--open", "opens", is_flag=True, help="Also open the page in the browser.")
@click.option(
    "--output", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="The file for the page. Default: report.html in RUN, in the common directory of several runs, or here.",
)  # fmt: skip
def command(runs: tuple[Path, ...], opens: bool, output: Path | None) -> None:
    """Write the run directories RUN as one page: verdict, curves, answers, data, how to reproduce it, what to do next.

    Several runs share one chart, with a table of the config keys that differ and the loss over each of these keys. A
    directory of runs stands for all of them. The page is one file that loads nothing else. A run writes its own page at
    its end, unless run.report is false.
    """
    import webbrowser

    from dualtune.cli.terminal import say
    from dualtune.show.report.run_page import run_page
    from dualtune.train.state.listing import runs_at
    from dualtune.train.state.run_dir import REPORT

    runs_by_path = {run.resolve(): run for path in runs for run in runs_at(path)}
    target = output or _place(runs, [*runs_by_path]) / REPORT
    write_file(target, run_page([*runs_by_path.values()], lambda problem: say(f"left out    {problem}", err=True)))
    say(f"report      {target}")
    if opens and not webbrowser.open(target.resolve().as_uri()):
        raise EnvironmentFault(f"{target}: no browser was found to open it. Open the file yourself")


def _place(paths: Sequence[Path], runs: Sequence[Path]) -> Path:
    """Return where the page of these runs lies: in the one that is given, beside them, or in the current directory."""
    if len(paths) == 1:
        return paths[0]
    parents = {run.parent for run in runs}
    return parents.pop() if len(parents) == 1 else Path()
