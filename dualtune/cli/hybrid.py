"""`dualtune hybrid`: what predictive training is worth on a config, beside what it must beat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.files import write_file
from dualtune.base.redaction import redact
from dualtune.base.text import in_bytes, in_columns
from dualtune.cli.options import backend_for, json_file_option, platform_option, set_option, write_json
from dualtune.cli.screen import phases
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.doctor.bench.digits import DigitsResult
    from dualtune.doctor.bench.hybrid import Comparison
    from dualtune.doctor.bench.intervals import Interval


@click.group("hybrid", cls=SuggestingGroup)
def command() -> None:
    """Compare predictive training, averages and schedule-free AdamW with ordinary runs of equal cost."""


@command.command("bench")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option(
    "--task", type=click.Choice(["demo", "digits"]),
    help="The task instead of CONFIG: the demo's model and data, or a small network that classifies images of digits.",
)  # fmt: skip
@click.option("--arms", metavar="NAME,…", help="Comma-separated arms to compare with the baseline.  [default: all]")
@click.option(
    "--seeds", type=click.IntRange(min=1),
    help="Number of runs of each arm, each with another seed.  [default: 3; with --task digits 5]",
)  # fmt: skip
@click.option("--tune", is_flag=True, help="Tune the learning rate of the baseline first, and use it for all arms.")
@json_file_option
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the losses to FILE as SVG."
)
@platform_option
@set_option
@click.pass_context
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)  # Ctrl-C ends it at once
def bench(
    ctx: click.Context, config: Path | None, task: str | None, arms: str | None, seeds: int | None, tune: bool,
    json_file: Path | None, plot_file: Path | None, platform: str, overrides: tuple[str, ...],
) -> None:  # fmt: skip
    """Train CONFIG in several ways (arms), each beside an ordinary run of the same cost.

    An arm is useful only if it ends with a lower loss than its control, an ordinary run whose schedule has as many
    steps as the cost of the arm pays for. Losses are those of data.eval, which no arm trains on or probes. Arms:
    baseline, predict, fast_forward, random (predictions in random directions), freeze (steps that change nothing),
    schedule_free, average.
    """
    if (config is None) == (task is None):
        raise click.UsageError("Give either CONFIG or --task.")
    if task == "digits":
        return _bench_digits(ctx, seeds or 5, json_file)
    from dualtune.cli.demo import TINY
    from dualtune.doctor.bench.hybrid import ARMS, compare, plot

    names = tuple(name.strip() for name in arms.split(",")) if arms else tuple(ARMS)
    source, changes = (config, overrides) if config else (TINY.config, (*TINY.places(), *overrides))
    backend = backend_for(platform)
    with phases() as shown:
        comparison = compare(
            source, changes, backend, arms=names, seeds=seeds or 3, tune=tune,
            tell=lambda arm: shown.begin("training", arm),
        )  # fmt: skip
    say(_as_text(comparison))
    write_json(json_file, comparison.as_json())
    if plot_file is not None:
        write_file(plot_file, plot(comparison))
    return None


def _bench_digits(ctx: click.Context, seeds: int, json_file: Path | None) -> None:
    """Train the presets and their controls on images of digits, in NumPy."""
    from click.core import ParameterSource

    from dualtune.doctor.bench.digits import digits

    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in ("task", "seeds", "json_file") and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} has no effect with --task digits; remove it.")
    with phases() as shown:
        result = digits(seeds, lambda what: shown.begin("training", what))
    say(digits_text(result))
    write_json(json_file, result.as_json())


def _as_text(comparison: Comparison) -> str:
    rates = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in comparison.tried_rates.items())
    rate = f"learning rate {comparison.learning_rate:g}" + (
        f", the best of {rates}" if rates else ", that of the config"
    )
    blocks = [rate, in_columns([*table(comparison)]), in_columns([*LEGEND])]
    if comparison.not_offered:
        blocks.append(
            "not offered\n" + in_columns([(f"  {name}", why) for name, why in comparison.not_offered.items()])
        )
    return redact("\n\n".join(blocks))


HEAD = (
    "arm", "cost", "loss", "perplexity", "control", "perplexity against control", "time", "predictions", "divergences",
    "verdict",
)  # fmt: skip
LEGEND = (
    ("cost", "of the baseline's, in steps; a probe counts by its tokens, a frozen step as a forward pass"),
    ("control", "the loss of a baseline whose whole schedule has as many steps as the arm's cost buys"),
    ("against control", "paired over the seeds, with a 95 % interval (Student's t)"),
    ("time", "in steps, by the clock, in times of the baseline's with a 95 % interval; as steady as the machine"),
    ("predictions", "accepted of attempted, and undone after their check, over all seeds"),
    ("divergences", "critical signals of the monitor, and undone predictions, over all seeds"),
)


def table(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, the header first."""
    from dualtune.doctor.bench.hybrid import BASELINE

    yield HEAD
    for result in comparison.results:
        counts, is_baseline = result.counts, result.arm.name == BASELINE
        predictions = f"{counts['accepted']} of {counts['attempts']}, {counts['undone']} undone" if counts else ""
        wall, margin = result.wall, "" if result.wall.margin is None else f" ± {result.wall.margin:.2f}"
        yield (
            result.arm.name,
            f"{result.cost:.3f}",
            f"{fmean(result.losses):.4f}",
            f"{result.perplexity:.3f}",
            "" if is_baseline else f"{fmean(trial.eval_loss for trial in result.controls):.4f}",
            "" if is_baseline else in_percent(result.against_control),
            "" if is_baseline else f"{wall.mean:.2f}{margin}",
            predictions,
            f"{counts['divergences']}" if counts else "",
            result.verdict,
        )


def in_percent(losses: Interval) -> str:
    """Return a difference of losses as one of perplexities: exp(d) − 1, with the ends of its interval."""
    low_to_high = [losses.mean] if losses.margin is None else [losses.mean - losses.margin, losses.mean + losses.margin]
    ends = [f"{100 * math.expm1(end):+.2f}" for end in low_to_high]
    mean = f"{100 * math.expm1(losses.mean):+.2f} %"
    return mean if losses.margin is None else f"{mean} ({ends[0]} to {ends[1]})"


def digits_text(result: DigitsResult) -> str:
    """Return the comparison on images of digits as text: two tables, and what the runs prove."""
    verdicts = [f"{row.rate}, {row.arm}: {row.verdict}" for row in result.rows if row.verdict]
    tables = in_columns([*digits_costs(result)]), in_columns([*digits_predictions(result)])
    return "\n\n".join([*tables, "\n".join(verdicts)])


def digits_costs(result: DigitsResult) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of what runs reached and took, the header first."""
    yield "rate", "arm", "accuracy", "loss", "cost", "of baseline's", "seconds", "peak memory"
    for row in result.rows:
        yield (
            row.rate, row.arm,
            _spread(row.values("accuracy"), 100, 2, " %"), _spread(row.values("eval_loss"), 1, 4),
            f"{fmean(row.values('cost')):.0f}", f"{row.cost_ratio:.2f}", _spread(row.values("wall_s"), 1, 2),
            in_bytes(fmean(row.values("peak_bytes"))),
        )  # fmt: skip


def digits_predictions(result: DigitsResult) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of what predictions did, the header first."""
    yield (
        "rate", "arm", "attempts", "accepted", "undone", "divergences", "backward passes skipped",
        "accuracy − control", "loss − control",
    )  # fmt: skip
    for row in result.rows:
        if row.control is None:
            continue
        counts = (str(row.counted(name)) for name in ("attempts", "accepted", "undone", "divergences"))
        yield (
            row.rate, row.arm, *counts, f"{row.backward_reduction_pct:.1f} %",
            _gap(row.against(row.control, "accuracy"), 100, 2), _gap(row.against(row.control, "eval_loss"), 1, 4),
        )  # fmt: skip


def _spread(values: Sequence[float], factor: float, places: int, unit: str = "") -> str:
    """Format mean ± standard deviation; of a single value, the value."""
    mean = f"{factor * fmean(values):.{places}f}"
    return f"{mean} ± {factor * stdev(values):.{places}f}{unit}" if len(values) > 1 else f"{mean}{unit}"


def _gap(gap: Interval, factor: float, places: int) -> str:
    """Format a mean difference ± half of its 95 % interval."""
    mean = f"{factor * gap.mean:+.{places}f}"
    return mean if gap.margin is None else f"{mean} ± {factor * gap.margin:.{places}f}"
