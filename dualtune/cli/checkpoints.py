"""`dualtune checkpoints`: list what a run can resume from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from dualtune.base.errors import FormatError
from dualtune.base.text import in_bytes, in_columns
from dualtune.cli.options import json_option, say_json


@click.command("checkpoints")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@json_option
def command(run_dir: Path, as_json: bool) -> None:
    """List the checkpoints of the run directory RUN, newest first, and verify every file of each.

    Exit code 6 if one of them is damaged.
    """
    from dualtune.cli.terminal import say
    from dualtune.train.state.listing import list_checkpoints
    from dualtune.train.state.run_dir import served_run

    checkpoints = list_checkpoints(run_dir)
    if as_json:
        say_json([asdict(entry) for entry in checkpoints])
    elif not checkpoints:
        states = (
            f": its states are in weights, dualtune checkpoints {run_dir}/weights/NAME" if served_run(run_dir) else ""
        )
        say(f"there is no checkpoint in {run_dir}{states}")
    else:
        rows = [("step", "size", "state", "")]
        for entry in checkpoints:
            state = "damaged" if entry.problem else "ok"
            note = entry.problem or ("best evaluation" if entry.is_best else "")
            rows.append((str(entry.step), in_bytes(entry.num_bytes), state, note))
        say(in_columns(rows))
    if damaged := [entry for entry in checkpoints if entry.problem]:
        raise FormatError(f"{len(damaged)} of {len(checkpoints)} checkpoints are damaged; resuming ignores them")
