"""`dualtune memory`: what the ways to save memory save and cost, measured here or by formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.redaction import redact
from dualtune.base.text import in_bytes, in_columns
from dualtune.cli.options import (
    config_argument,
    json_file_option,
    json_option,
    machine_option,
    platform_option,
    say_json,
    set_option,
    write_json,
)
from dualtune.cli.screen import phases
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.doctor.bench.ablation import Ablation
    from dualtune.engine.strategies import Strategy


@click.group("memory", cls=SuggestingGroup)
def command() -> None:
    """Show how much memory each technique saves and how much time it costs, measured or by formula."""


@command.command("ablate")
@config_argument
@click.option(
    "--steps", type=click.IntRange(min=1), default=3, show_default=True,
    help="Number of steps to measure, after a first one that may compile.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(min=1), default=2, show_default=True,
    help="How many times each technique is timed, in turn.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="NAME", help="Measure only this technique, besides none. Repeatable.")
@json_file_option
@platform_option
@set_option
@click.pass_context
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)  # Ctrl-C ends it at once
def ablate(
    ctx: click.Context, config: Path, steps: int, rounds: int, only: tuple[str, ...], json_file: Path | None,
    platform: str, overrides: tuple[str, ...],
) -> None:  # fmt: skip
    """Measure each memory technique alone and all together, with the model and data of CONFIG, against the plan.

    Each measurement runs in its own process; the run directory is not touched. Exit code 0 if every plan is within 10 %
    of the measurement and, in float32, no loss changes that must not; otherwise 1, and the failures are named.
    """
    from dualtune.doctor.bench import ablation

    with phases() as shown:
        result = ablation.ablate(
            config, overrides, platform, steps=steps, rounds=rounds, only=only,
            tell=lambda technique: shown.begin("measuring", technique),
        )  # fmt: skip
    say(_as_text(result))
    write_json(json_file, result.as_json())
    ctx.exit(1 if result.problems else 0)


@command.command("strategies")
@config_argument
@machine_option
@platform_option
@set_option
@json_option
def strategies(config: Path, name: str, platform: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what each strategy for memory saves and costs for CONFIG, by formula: nothing is loaded or measured.

    Times are for links of 12 and 24 GB/s between host and device. What is not offered is named, with the reason.
    """
    from dualtune.config import load_config
    from dualtune.doctor.bench.measure import limits_here
    from dualtune.doctor.check_config import plan_config
    from dualtune.doctor.check_config_data import look_at_data, typical_step, with_lengths_of
    from dualtune.engine.choose import choose
    from dualtune.engine.detect import detect
    from dualtune.engine.machines import named, published
    from dualtune.engine.strategies import LINKS, search_share
    from dualtune.engine.strategies import strategies as found

    settings = load_config(config, overrides)
    machine = detect() if name == "this" else named(name)
    choice = choose(platform, machine)
    samples = look_at_data(settings)
    plan = plan_config(with_lengths_of(settings, samples)[0], machine, choice)
    limits = limits_here(choice, machine, plan.ask.dtype) if name == "this" else published(machine)
    rows = found(plan.decoder, plan.ask, typical_step(settings, samples), limits)
    share = search_share(plan.decoder, plan.ask)
    if as_json:
        say_json({"links_bytes_per_s": LINKS, "search_share": share, "strategies": [row.as_json() for row in rows]})
    else:
        say(f"{_strategies_text(rows)}\n\na search takes {share:.2f} of the peak of a step with this config")


def _strategies_text(rows: Sequence[Strategy]) -> str:
    from dualtune.engine.strategies import LINKS

    header = ("strategy", "saved", *(f"at {link / 1e9:g} GB/s" for link in LINKS), "for each", "settings", "")
    offered = [_strategy(row) for row in rows if row.saved_bytes is not None]
    refused = [(row.name, row.remark) for row in rows if row.saved_bytes is None]
    return redact("\n\n".join([in_columns([header, *offered]), "not offered\n" + in_columns(refused)]))


def _strategy(row: Strategy) -> tuple[str, ...]:
    added = ("not known",) * 2 if row.added_s is None else (f"{seconds:+.3f} s" for seconds in row.added_s)
    settings = " ".join(f"{key}={value}" for key, value in row.settings.items())
    return row.name, in_bytes(row.saved_bytes or 0), *added, row.during, settings, row.remark


def _as_text(ablation: Ablation) -> str:
    blocks = [in_columns([*_rows(ablation)]), in_columns(_legend(ablation))]
    if ablation.not_offered:
        blocks.append("not offered\n" + in_columns([(f"  {name}", why) for name, why in ablation.not_offered.items()]))
    blocks.append("\n".join(ablation.problems) or "every plan is within 10 % of what was measured")
    return redact("\n\n".join(blocks))


def _rows(ablation: Ablation) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, the header first."""
    yield "technique", "planned", "measured", "plan is off", "process", "time", "loss", "of none"
    for row in ablation.rows:
        time, off = row.time_of(ablation.baseline), row.loss_difference(ablation.baseline)
        yield (
            row.technique.name,
            *("" if size is None else in_bytes(size) for size in (row.planned_bytes, row.peak_bytes)),
            "" if row.difference is None else f"{row.difference:+.1%}",
            "" if row.process_bytes is None else in_bytes(row.process_bytes),
            "" if time is None else f"{time:.2f}",
            "" if row.loss is None else f"{row.loss:.6f}",
            "" if off is None else f"{off:+.1e}",
        )


def _legend(ablation: Ablation) -> list[tuple[str, str]]:
    measured = ablation.baseline.measured
    cells = max((cells for cells, _ in measured[0].micro_batches), default=0) if measured else 0
    of = f", for micro-batches of up to {cells:,} tokens" if cells else ""
    return [
        ("planned, measured", f"the most bytes in tensors at once{of}"),
        ("process", "on a CPU: its anonymous memory, without mapped files"),
        ("time", "a step, in times of that without any technique; on a CPU its processor time"),
        ("loss", "of the last step, and its difference from that without any technique, as a share"),
    ]
