"""`dualtune track`: the numbers of a run for a tracker, after the run or where it could not send them."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.base import interrupt
from dualtune.base.errors import DualtuneError, EnvironmentFault
from dualtune.base.text import one_line
from dualtune.cli.terminal import say

NAMES = ("trackio", "wandb", "mlflow", "tensorboard")  # dualtune.show.trackers, which has them too, is imported late


@click.command("track")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", "name", type=click.Choice(NAMES), required=True, help="The tracker to send to.")
@interrupt.handled(interrupt.TERMINATION)
def command(run: Path, name: str) -> None:
    """Send those numbers of the run directory RUN to a tracker that it does not have yet.

    `run.track: [NAME]` in a config does the same while the run trains. W&B is offline unless WANDB_MODE is online.
    """
    from dualtune.show.trackers.send import Sender, only_sender
    from dualtune.show.trackers.tracker import check_installed
    from dualtune.train.state.run_dir import check_is_run

    check_is_run(run)
    check_installed([name])
    with only_sender(run, name, waits=False):
        sender = Sender(run, name, lambda text: say(text, err=True))
        try:
            sent = sender.send()
            sender.close()
        except DualtuneError:
            raise
        except Exception as error:
            detail = f"{type(error).__name__}: {one_line(str(error))[:300]}"
            raise EnvironmentFault(
                f"{name}: {detail}. {sender.num_waiting} rows are not sent; the same command sends the rest"
            ) from error
    say(f"{run}: {sent} rows sent to {name}")
