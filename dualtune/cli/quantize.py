"""`dualtune quantize`: what each format of the base costs in loss, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.files import expanded, write_file
from dualtune.base.redaction import redact
from dualtune.base.text import in_columns
from dualtune.cli.options import (
    backend_for,
    config_argument,
    json_option,
    platform_option,
    say_json,
    set_option,
    to_json,
)
from dualtune.cli.screen import phases
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.use.scoring.compare import FormatComparison, FormatLoss


@click.command("quantize")
@config_argument
@click.option("--compare", is_flag=True, help="Compare the formats; required, because it is the only action so far.")
@click.option(
    "--rows", type=click.IntRange(min=1), default=20, show_default=True,
    help="Number of rows of data.train to measure on.",
)  # fmt: skip
@click.option(
    "--format", "formats", multiple=True, metavar="NAME",
    help="A value of model.quantization to measure, besides none. Repeatable. Default: all that the backend has.",
)  # fmt: skip
@platform_option
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)  # Ctrl-C ends it at once
def command(
    config: Path, compare: bool, rows: int, formats: tuple[str, ...], platform: str, overrides: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Measure the loss of the base model of CONFIG in each quantization, on rows of the config, without an adapter.

    Every number is measured, none is estimated. If the config's run directory holds a run, the result is saved there
    (base_formats.json) and shown in its report. No weights are written: the base is quantized whenever it is loaded, as
    model.quantization says.
    """
    if not compare:
        raise click.UsageError(
            "A base is quantized when it is loaded: set model.quantization. To measure what that costs, give --compare."
        )

    with phases(err=as_json) as shown:
        shown.begin("reading", "the config")
        from dualtune.config import load_config
        from dualtune.engine.capabilities import check_value
        from dualtune.train.recovery import explained
        from dualtune.use.scoring.compare import UNQUANTIZED, compare_formats

        settings = load_config(config, overrides)
        backend = backend_for(platform, err=as_json)
        # Formats that this backend lacks are refused before the first one is measured.
        names = list(dict.fromkeys((UNQUANTIZED, *formats))) if formats else []
        for name in names:
            check_value(backend, "model.quantization", name)
        with explained(backend, settings, "while a format of the base was measured"):
            comparison = compare_formats(
                settings, backend, rows, names, lambda name: shown.begin("measuring", name),
                lambda result: shown.finish("measured", _loss_text(result)), shown.update,
            )  # fmt: skip
    # The report of a run shows what its format costs, so the result is kept with the run.
    path = _keep(expanded(settings.run.dir), comparison)
    if as_json:
        return say_json(comparison.as_json())
    return say(_as_text(comparison) + (f"\n\nkept in {path}" if path else ""))


def _loss_text(measured: FormatLoss) -> str:
    return redact(f"not: {measured.problem}," if measured.loss is None else f"loss {measured.loss:.4f}")


def _keep(run_dir: Path, comparison: FormatComparison) -> Path | None:
    """Write the result beside a run, if there is one. Return the file."""
    from dualtune.train.state.run_dir import BASE_FORMATS, ENVIRONMENT

    if not (run_dir / ENVIRONMENT).is_file():
        return None
    write_file(run_dir / BASE_FORMATS, to_json(comparison.as_json()) + "\n")
    return run_dir / BASE_FORMATS


def _as_text(comparison: FormatComparison) -> str:
    rows = [("format", "loss", "above unquantized")]
    for row in comparison.as_json()["formats"]:
        loss, above = row["loss"], row["above"]
        last = row["problem"] or ("" if above is None or row["quantization"] == "none" else f"{above:+.4f}")
        rows.append((row["quantization"], "–" if loss is None else f"{loss:.4f}", last))
    data = f"{comparison.rows} rows, {comparison.targets} targets, computed in {comparison.dtype}"
    head = f"{comparison.model}, without an adapter: {data}"
    return redact(f"{head}\n\n{in_columns(rows)}")
