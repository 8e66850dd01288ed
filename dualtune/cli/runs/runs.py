"""`dualtune runs`: list your runs and their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.cli.options import json_option, to_json
from dualtune.cli.runs import clean, compare
from dualtune.cli.suggest import CommandWithOthers

if TYPE_CHECKING:
    from dualtune.train.state.listing import RunSummary

# The sort orders of runs; unknown values come last.
ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    "name": lambda run: run.path,
    "date": lambda run: _newest_first(run.date),
    "state": lambda run: run.state,
    "verdict": lambda run: run.verdict or "~",
    "step": lambda run: _lowest_first(None if run.step is None else -run.step),
    "lr": lambda run: _lowest_first(run.learning_rate),
    "model": lambda run: run.model or "~",
    "start": lambda run: _newest_first(run.start),
    "loss": lambda run: _lowest_first(run.loss),
    "eval": lambda run: _lowest_first(run.eval_loss),
    "best": lambda run: _lowest_first(run.best_eval_loss),
    "time": lambda run: _lowest_first(None if run.seconds is None else -run.seconds),
}
# The columns that a narrow terminal omits, in this order.
LEAST_IMPORTANT = ("start", "saved", "time", "model", "lr", "best eval", "date", "eval loss", "verdict")
MIN_NAME = 12
STATES = ("running", "done", "preempted", "killed", "failed", "unreadable")
NO_LIMIT = 10_000  # columns, for output to a file or another program


@click.command("runs", cls=CommandWithOthers, others=[compare.command, clean.command])
@click.argument("directory", type=click.Path(path_type=Path), default="runs")
@click.option("--sort", type=click.Choice([*ORDERS]), default="name", show_default=True, help="The column to sort by.")
@click.option(
    "--state", "states", type=click.Choice(STATES), multiple=True, help="Only runs in this state. Repeatable."
)
@click.option("--model", metavar="TEXT", help="Only runs whose model has this in its name.")
@click.option(
    "--where", "conditions", multiple=True, metavar="KEY=VALUE",
    help="Only runs whose config has this value, e.g. learning_rate=1e-4; also !=, <, <=, >, >=. Repeatable.",
)  # fmt: skip
@json_option
def command(
    directory: Path, sort: str, states: tuple[str, ...], model: str | None, conditions: tuple[str, ...], as_json: bool
) -> None:
    """List the run directories at or below DIRECTORY (default: runs), with their numbers and their verdict.

    A run is running, done, preempted or killed (run its command again), failed, or unreadable.
    `train loss` is that of the last step (a verdict and a report smooth it, and say how), `eval loss` that of the last
    evaluation, `time` the time spent in steps, `date` the end (the start, if it runs or was killed), `saved` the step
    of the last checkpoint.

    `dualtune runs compare A B…` shows runs side by side, `dualtune runs clean DIRECTORY` deletes what is not needed any
    more; both have a help of their own.
    """
    import sys
    from dataclasses import asdict

    from dualtune.cli.output.screen import is_live, width
    from dualtune.cli.output.terminal import say
    from dualtune.train.state.configs import Condition, read_flat
    from dualtune.train.state.listing import list_runs

    wanted = [Condition(text) for text in conditions]
    runs = sorted(list_runs(directory), key=ORDERS[sort])
    configs = {run.path: read_flat(Path(run.path)) for run in runs} if wanted else {}
    found = [
        run
        for run in runs
        if (not states or run.state in states)
        and (model is None or model.lower() in (run.model or "").lower())
        and all(condition.holds(configs[run.path]) for condition in wanted)
    ]
    if as_json:
        return say(to_json([asdict(run) for run in found]))
    if not found:
        such = "such " if states or model or conditions else ""
        absent = [each.key for each in wanted if not any(map(each.concerns, configs.values()))]
        why = f": none has the key {', '.join(absent)}" if absent else ""
        return say(f"there is no {such}run in {directory}{why}")
    return say("\n".join(table(found, width() if is_live(sys.stdout) else NO_LIMIT)))


def table(runs: Sequence[RunSummary], width: int) -> list[str]:
    """Return a line for each run, with the columns that fit and the reason below."""
    import textwrap

    from dualtune.io.fields import shown
    from dualtune.text.show import in_columns

    columns, dropped = [_cells(run) for run in runs], list[str]()
    while (too_wide := _width(columns) - width) > 0 and len(dropped) < len(LEAST_IMPORTANT):
        dropped.append(LEAST_IMPORTANT[len(dropped)])
        columns = [{key: cell for key, cell in cells.items() if key != dropped[-1]} for cells in columns]
    if too_wide > 0:
        longest = max(MIN_NAME, max(len(cells["run"]) for cells in columns) - too_wide)
        columns = [cells | {"run": _tail(cells["run"], longest)} for cells in columns]
    header, *lines = in_columns([[*columns[0]], *([*cells.values()] for cells in columns)]).splitlines()
    output = [header]
    for run, line in zip(runs, lines, strict=True):
        output.append(line)
        if run.reason:
            reason = shown(run.reason, 500)
            output += textwrap.wrap(reason, width, initial_indent="    ", subsequent_indent="    ")
    if dropped:
        note = f"(too narrow for: {', '.join(dropped)}; --json has everything)"
        output += textwrap.wrap(note, width)
    return output


def _cells(run: RunSummary) -> dict[str, str]:
    from dualtune.io.fields import shown

    return {
        "run": shown(run.path, 1000),
        "state": run.state,
        "verdict": shown(run.verdict or "-", 20),
        "step": _number(run.step) + (f"/{run.num_steps}" if run.num_steps else ""),
        "train loss": _loss(run.loss),
        "eval loss": _loss(run.eval_loss),
        "best eval": _loss(run.best_eval_loss),
        "lr": "-" if run.learning_rate is None else f"{run.learning_rate:g}",
        "model": shown(Path(run.model).name, 30) if run.model else "-",
        "start": _minute(run.start),
        "date": _minute(run.date),
        "time": _duration(run.seconds),
        "saved": _number(run.checkpoint),
    }


def _width(columns: Sequence[dict[str, str]]) -> int:
    widths = [max(len(key), *(len(cells[key]) for cells in columns)) for key in columns[0]]
    return sum(widths) + 2 * (len(widths) - 1)


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[1 - length :]


def _minute(date: str | None) -> str:
    return date[:16].replace("T", " ") if date else "-"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _duration(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < 1e9:
        return "-"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 1 else f"{minutes:.0f} min" if hours < 1 else f"{hours:.1f} h"


def _lowest_first(value: float | None) -> tuple[bool, float]:
    return (True, 0.0) if value is None or math.isnan(value) else (False, value)


def _newest_first(date: str | None) -> tuple[bool, tuple[int, ...]]:
    return (date is None, tuple(-ord(character) for character in date or ""))
