"""`dualtune runs`: what became of your runs."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.cli.options import json_option


@click.command("runs")
@click.argument("directory", type=click.Path(path_type=Path), default="runs")
@json_option
def command(directory: Path, as_json: bool) -> None:
    """List the run directories at or below DIRECTORY (default: runs) with state, step, loss and last checkpoint.

    A run is running, done, preempted (run its command again) or failed.
    """
    import json
    from dataclasses import asdict

    from dualtune.cli.terminal import say
    from dualtune.show import in_columns
    from dualtune.train.listing import list_runs

    found = list_runs(directory)
    if as_json:
        return say(json.dumps([asdict(run) for run in found], indent=2))
    if not found:
        return say(f"there is no run in {directory}")
    rows = [("run", "state", "step", "loss", "eval loss", "checkpoint", "")]
    for run in found:
        step = f"{_shown(run.step)}/{run.num_steps}" if run.num_steps else _shown(run.step)
        loss, eval_loss = (f"{value:.4f}" if value is not None else "-" for value in (run.loss, run.eval_loss))
        rows.append((run.path, run.state, step, loss, eval_loss, _shown(run.checkpoint), run.reason))
    return say(in_columns(rows))


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)
