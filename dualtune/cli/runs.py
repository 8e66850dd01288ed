"""`dualtune runs`: list your runs and their state."""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.base.fields import shown
from dualtune.base.text import in_bytes, in_columns, in_time
from dualtune.cli.options import json_option, say_json
from dualtune.cli.screen import is_live, width
from dualtune.cli.suggest import CommandWithOthers

if TYPE_CHECKING:
    from dualtune.train.state.listing import RunSummary

# ----------------------------------------------------------------------------------------------------------------------
# `dualtune runs clean`: delete what is not needed any more of runs that are over.


@click.command("clean")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Delete without asking.")
@json_option
def clean(directory: Path, yes: bool, as_json: bool) -> None:
    """List what can be deleted of the runs at or below DIRECTORY, with sizes, ask, and delete it.

    These are the checkpoints of finished runs, but never the last and the best one, and failed runs without a
    checkpoint. A run that is running, killed or preempted is left alone, and so are caches, adapters and links. Without
    a terminal, or with --json, nothing is deleted unless --yes is given.
    """
    from dualtune.cli.terminal import say
    from dualtune.train.state.listing import deletable, delete

    deletions = deletable(directory)
    total = f"{len(deletions)} directories, {in_bytes(sum(entry.num_bytes for entry in deletions))}"
    if not as_json:
        if not deletions:
            return say(f"there is nothing to delete in {directory}")
        say(in_columns([(in_bytes(entry.num_bytes), entry.path, entry.why) for entry in deletions]))
        if not yes and not sys.stdin.isatty():
            return say(f"{total}. Nothing was deleted: give --yes to delete them")
    if not yes and (as_json or not click.confirm(f"Delete these {total}?")):
        listed = {"found": [asdict(entry) for entry in deletions], "deleted": [], "left": []}
        return say_json(listed) if as_json else say("nothing was deleted")
    deleted, left_alone = delete(deletions)
    if as_json:
        tables = {
            name: [asdict(entry) for entry in entries] for name, entries in (("found", deletions), ("deleted", deleted))
        }
        return say_json(tables | {"left": left_alone})
    for reason in left_alone:
        say(f"left alone  {reason}")
    return say(f"deleted     {len(deleted)} directories, {in_bytes(sum(entry.num_bytes for entry in deleted))}")


# ----------------------------------------------------------------------------------------------------------------------
# `dualtune runs compare`: what differs between runs, their numbers side by side, and their curves.

PLAIN_WIDTH = 80  # columns of the curves, without a terminal
NUMBERS = ("state", "verdict", "step", "loss", "eval_loss", "best_eval_loss", "seconds")
MAX_VALUE = 60  # characters of a config value


@click.command("compare")
@click.argument("runs", metavar="A B…", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Compare run directories: the config keys that differ, last and best numbers, and the curves of the loss.

    A directory of runs, such as a sweep's, stands for all of them.

    Another program gets plain ASCII; NO_COLOR turns colours off.
    """
    from dualtune.cli.console import drawn
    from dualtune.cli.terminal import say, say_styled
    from dualtune.show.report.run_files import names_apart
    from dualtune.train.state.listing import runs_at, summary_of
    from dualtune.train.state.metrics import each_row
    from dualtune.train.state.resume import differing, read_flat
    from dualtune.train.state.run_dir import METRICS

    runs = tuple(run for path in runs for run in runs_at(path))
    if len(runs) < 2:
        raise click.UsageError("Give at least two run directories.")
    summaries = [summary_of(run) for run in runs]
    differs = differing([read_flat(run) for run in runs])
    curves = [[(row["step"], row["loss"]) for row in each_row(run / METRICS) if "loss" in row] for run in runs]
    if as_json:
        table = {"runs": [asdict(run) for run in summaries], "differs": differs, "losses": curves}
        return say_json(table)
    # A letter stands for a run in the curves, where its name would not fit.
    letters = [chr(ord("A") + i % 26) for i in range(len(runs))]
    names = names_apart(runs)
    rows = [("", *letters), ("run", *map(shown, names))]
    for key in NUMBERS:
        rows.append(("train_loss" if key == "loss" else key, *(_cell(getattr(run, key)) for run in summaries)))
    rows += [(shown(key), *map(_cell, values)) for key, values in differs.items()]
    say(in_columns(rows))
    live = is_live(sys.stdout)
    curves_by_name = {f"{letter}: {name}": curve for letter, name, curve in zip(letters, names, curves, strict=True)}
    for line in drawn(curves_by_name, width() if live else PLAIN_WIDTH, plain=not live):
        say_styled([(text, {} if "NO_COLOR" in os.environ else style) for text, style in line])
    return None


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else shown(str(value), MAX_VALUE)


# ----------------------------------------------------------------------------------------------------------------------
# `dualtune runs export`: the numbers of a run as a table for other programs.

# Of metrics.jsonl, and of memory.csv the most of all phases of the step.
FROM_METRICS = (
    "time", "step", "epoch", "loss", "eval_loss", "lr", "grad_norm", "num_targets", "num_tokens", "step_s",
    "tokens_per_s", "documents_per_min", "peak_bytes",
)  # fmt: skip
FROM_MEMORY = ("used_bytes", "cached_bytes", "process_bytes", "device_bytes", "gpu_percent", "power_w")
COLUMNS: tuple[str, ...] = (*FROM_METRICS, "perplexity", "eval_perplexity", *FROM_MEMORY)


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to", "target", metavar="FILE", type=click.Path(path_type=Path), help="A new file.  [default: standard output]"
)
def export(run: Path, target: Path | None) -> None:
    """Write the numbers of a run directory as CSV: a row for each step, with its evaluation and memory.

    The columns are always the same, and a run that compares answers has those of its metrics behind them; a cell
    without a number is empty. Perplexity is exp(loss) over target tokens. The evaluation before the first step is
    row 0.
    """
    import csv
    import io

    from dualtune.base.errors import ConfigError
    from dualtune.base.files import write_file
    from dualtune.cli.terminal import say
    from dualtune.train.state.run_dir import check_is_run

    check_is_run(run)
    if target is not None and target.exists():
        raise ConfigError(f"--to: {target} exists already. Name a new file")
    text, rows = io.StringIO(), _exported(run)
    metrics = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
    writer = csv.DictWriter(text, (*COLUMNS, *metrics), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if target is None:
        return say(text.getvalue().removesuffix("\n"))
    write_file(target, text.getvalue())
    return say(f"exported    {target}")


def _exported(run: Path) -> list[dict[str, Any]]:
    """Return a row for each step, in the order of the file: a step that was repeated after a rollback comes twice."""
    from dualtune.train.state.metrics import each_row, metrics_in, perplexity
    from dualtune.train.state.run_dir import METRICS

    memory, rows = _memory_by_step(run), list[dict[str, Any]]()
    for row in each_row(run / METRICS):
        if "eval_loss" in row and rows and rows[-1]["step"] == row["step"]:
            rows[-1] |= {"eval_loss": row["eval_loss"], **metrics_in(row)}
        elif "loss" in row or "eval_loss" in row:
            own = {name: row[name] for name in FROM_METRICS if name in row}
            rows.append(own | memory.get(row["step"], {}) | metrics_in(row))
    for row in rows:
        if not row.keys() <= {*COLUMNS}:
            continue  # the loss of a comparison is not that of a token
        for name, loss in (("perplexity", "loss"), ("eval_perplexity", "eval_loss")):
            if loss in row:
                row[name] = perplexity(row[loss])
    return rows


def _memory_by_step(run: Path) -> dict[int, dict[str, float]]:
    """Return the most of each column of memory.csv by step; nothing for a run without the file."""
    from dualtune.train.profiler.snapshot import each_snapshot
    from dualtune.train.state.run_dir import TIMELINE

    most: dict[int, dict[str, float]] = {}
    for snapshot in each_snapshot(run / TIMELINE) if (run / TIMELINE).exists() else ():
        of_step = most.setdefault(snapshot.step, {})
        for name in FROM_MEMORY:
            number: float | None = getattr(snapshot, name)
            if number is not None:
                of_step[name] = max(number, of_step.get(name, 0))
    return most


# ----------------------------------------------------------------------------------------------------------------------
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


@click.command("runs", cls=CommandWithOthers, others=[compare, export, clean])
@click.argument("directory", type=click.Path(path_type=Path), default="runs")
@click.option("--sort", type=click.Choice([*ORDERS]), default="name", show_default=True, help="The column to sort by.")
@click.option(
    "--state", "states", type=click.Choice(STATES), multiple=True, help="List only runs in this state. Repeatable."
)
@click.option("--model", metavar="TEXT", help="List only runs whose model name contains this.")
@click.option(
    "--where", "conditions", multiple=True, metavar="KEY=VALUE",
    help="List only runs whose config has this value, e.g. learning_rate=1e-4; also !=, <, <=, >, >=. Repeatable.",
)  # fmt: skip
@json_option
def command(
    directory: Path, sort: str, states: tuple[str, ...], model: str | None, conditions: tuple[str, ...], as_json: bool
) -> None:
    """List the run directories at or below DIRECTORY (default: runs), with their numbers and verdicts.

    A run is running, done, preempted or killed (run its command again), failed, or unreadable.
    `train loss` is that of the last step (verdicts and reports smooth it, and say how), `eval loss` that of the last
    evaluation, `time` the time spent in steps, `date` the end of the run (its start if it is running or was killed),
    `saved` the step of the last checkpoint.

    `dualtune runs compare A B…` shows runs side by side, `dualtune runs export RUN` writes the numbers of one as CSV,
    `dualtune runs clean DIRECTORY` deletes what is no longer needed; see their own --help.
    """
    from dualtune.cli.terminal import say
    from dualtune.train.state.listing import list_runs
    from dualtune.train.state.resume import Condition, read_flat

    filters = [Condition(text) for text in conditions]
    runs = sorted(list_runs(directory), key=ORDERS[sort])
    configs = {run.path: read_flat(Path(run.path)) for run in runs} if filters else {}
    summaries = [
        run
        for run in runs
        if (not states or run.state in states)
        and (model is None or model.lower() in (run.model or "").lower())
        and all(condition.holds(configs[run.path]) for condition in filters)
    ]
    if as_json:
        return say_json([asdict(run) for run in summaries])
    if not summaries:
        such = "such " if states or model or conditions else ""
        absent = [filter_.key for filter_ in filters if not any(map(filter_.concerns, configs.values()))]
        why = f": none has the key {', '.join(absent)}" if absent else ""
        return say(f"there is no {such}run in {directory}{why}")
    return say("\n".join(table(summaries, width() if is_live(sys.stdout) else NO_LIMIT)))


def table(runs: Sequence[RunSummary], width: int) -> list[str]:
    """Return a line for each run, with the columns that fit and the reason below."""
    columns, dropped = [_cells(run) for run in runs], list[str]()

    def lines() -> list[str]:
        return in_columns([[*columns[0]], *([*cells.values()] for cells in columns)]).splitlines()

    # Columns go until the rest fits; then the names of the runs are cut.
    while (too_wide := max(map(len, lines())) - width) > 0 and len(dropped) < len(LEAST_IMPORTANT):
        dropped.append(LEAST_IMPORTANT[len(dropped)])
        columns = [{key: cell for key, cell in cells.items() if key != dropped[-1]} for cells in columns]
    if too_wide > 0:
        longest = max(MIN_NAME, max(len(cells["run"]) for cells in columns) - too_wide)
        names = (cells["run"] for cells in columns)
        shorter = [name if len(name) <= longest else "…" + name[1 - longest :] for name in names]
        columns = [cells | {"run": name} for cells, name in zip(columns, shorter, strict=True)]
    header, *rows = lines()
    output = [header]
    for run, row in zip(runs, rows, strict=True):
        output.append(row)
        if run.reason:
            reason = shown(run.reason, 500)
            output += textwrap.wrap(reason, width, initial_indent="    ", subsequent_indent="    ")
    if dropped:
        output += textwrap.wrap(f"(too narrow for: {', '.join(dropped)}; --json has everything)", width)
    return output


def _cells(run: RunSummary) -> dict[str, str]:
    def date(text: str | None) -> str:
        return text[:16].replace("T", " ") if text else "-"

    def number(value: float | None, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    return {
        "run": shown(run.path, 1000),
        "state": run.state,
        "verdict": shown(run.verdict or "-", 20),
        "step": number(run.step) + (f"/{run.num_steps}" if run.num_steps else ""),
        "train loss": number(run.loss, ".4f"),
        "eval loss": number(run.eval_loss, ".4f"),
        "best eval": number(run.best_eval_loss, ".4f"),
        "lr": number(run.learning_rate, "g"),
        "model": shown(Path(run.model).name, 30) if run.model else "-",
        "start": date(run.start),
        "date": date(run.date),
        "time": in_time(run.seconds) if run.seconds is not None and 0 <= run.seconds < 1e9 else "-",
        "saved": number(run.checkpoint),
    }


def _lowest_first(value: float | None) -> tuple[bool, float]:
    return (True, 0.0) if value is None or math.isnan(value) else (False, value)


def _newest_first(date: str | None) -> tuple[bool, tuple[int, ...]]:
    return (date is None, tuple(-ord(character) for character in date or ""))
