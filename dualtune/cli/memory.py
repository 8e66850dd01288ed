"""`dualtune memory`: what the ways to save memory save and cost on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.redaction import redact
from dualtune.base.text import in_bytes, in_columns
from dualtune.cli.options import config_argument, json_file_option, platform_option, set_option, write_json
from dualtune.cli.screen import phases
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.doctor.bench.ablation import Ablation


@click.group("memory", cls=SuggestingGroup)
def command() -> None:
    """Measure how much memory each technique saves and how much time it costs."""


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
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # Ctrl-C ends it at once: there is nothing to save
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
