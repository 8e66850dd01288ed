"""`dualtune runs compare`: what differs between runs, their numbers side by side, and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.cli.options import json_option, to_json

if TYPE_CHECKING:
    from dualtune.train.state.listing import RunSummary

PLAIN_WIDTH = 80  # columns of the curves, without a terminal
NUMBERS = ("state", "verdict", "step", "loss", "eval_loss", "best_eval_loss", "seconds")
MAX_VALUE = 60  # characters of a config value


@click.command("compare")
@click.argument("runs", metavar="A B…", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def command(runs: tuple[Path, ...], as_json: bool) -> None:
    """Compare run directories: the config keys that differ, last and best numbers, and the curves of the loss.

    A directory of runs, such as a sweep's, stands for all of them.

    Another program gets plain ASCII; NO_COLOR turns colours off.
    """
    import os
    import sys
    from dataclasses import asdict

    from dualtune.cli.output.curves import drawn
    from dualtune.cli.output.screen import is_live, width
    from dualtune.cli.output.terminal import say, say_styled
    from dualtune.train.state.configs import differing, read_flat
    from dualtune.train.state.listing import runs_at, summary_of
    from dualtune.train.state.metrics import each_row
    from dualtune.train.state.run_dir import METRICS

    runs = tuple(run for given in runs for run in runs_at(given))
    if len(runs) < 2:
        raise click.UsageError("Give at least two run directories.")
    found = [summary_of(run) for run in runs]
    differs = differing([read_flat(run) for run in runs])
    curves = [[(row["step"], row["loss"]) for row in each_row(run / METRICS) if "loss" in row] for run in runs]
    if as_json:
        table = {"runs": [asdict(run) for run in found], "differs": differs, "losses": curves}
        return say(to_json(table))
    say(_table(found, differs))
    live = is_live(sys.stdout)
    names = [f"{letter}: {name}" for letter, name in zip(_letters(runs), _names(runs), strict=True)]
    columns = width() if live else PLAIN_WIDTH
    for line in drawn(dict(zip(names, curves, strict=True)), columns, plain=not live):
        say_styled([(text, {} if "NO_COLOR" in os.environ else style) for text, style in line])
    return None


def _table(found: Sequence[RunSummary], differs: dict[str, list[Any]]) -> str:
    """Return the table, a column for each run: its letter and name, its numbers, the keys that differ."""
    from dualtune.io.fields import shown
    from dualtune.text.show import in_columns

    paths = [Path(run.path) for run in found]
    rows = [("", *_letters(paths)), ("run", *(shown(name) for name in _names(paths)))]
    rows += [
        ("train_loss" if name == "loss" else name, *(_cell(getattr(run, name)) for run in found)) for name in NUMBERS
    ]
    rows += [(shown(key), *map(_cell, values)) for key, values in differs.items()]
    return in_columns(rows)


def _letters(runs: Sequence[Path]) -> list[str]:
    return [chr(ord("A") + i % 26) for i in range(len(runs))]


def _names(runs: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, or the whole paths if two have the same name."""
    names = [run.resolve().name for run in runs]
    return names if len({*names}) == len(names) else [str(run) for run in runs]


def _cell(value: Any) -> str:
    from dualtune.io.fields import shown

    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else shown(str(value), MAX_VALUE)
