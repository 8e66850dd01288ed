"""`dualtune hybrid`: what predictive training is worth on a config, beside what it must beat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.files import write_file
from dualtune.base.redaction import redact
from dualtune.base.text import in_columns
from dualtune.cli.options import backend_for, platform_option, set_option, write_json
from dualtune.cli.screen import phases
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.doctor.bench.hybrid import Comparison


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
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE",
    help="Also write the result to FILE as JSON.",
)  # fmt: skip
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the losses to FILE as SVG."
)
@platform_option
@set_option
@click.pass_context
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # Ctrl-C ends it at once: there is nothing to save
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
        found = digits(seeds, lambda what: shown.begin("training", what))
    say("\n".join(found.lines()))
    write_json(json_file, found.as_json())


def _as_text(comparison: Comparison) -> str:
    from dualtune.doctor.bench.hybrid import LEGEND, lines

    rates = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in comparison.tried_rates.items())
    rate = f"learning rate {comparison.learning_rate:g}" + (
        f", the best of {rates}" if rates else ", that of the config"
    )
    blocks = [rate, in_columns([*lines(comparison)]), in_columns([*LEGEND])]
    if comparison.not_offered:
        blocks.append(
            "not offered\n" + in_columns([(f"  {name}", why) for name, why in comparison.not_offered.items()])
        )
    return redact("\n\n".join(blocks))
