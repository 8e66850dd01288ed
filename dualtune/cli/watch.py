"""`dualtune watch`: show a run that trains elsewhere, from its files."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base.errors import EnvironmentFault
from dualtune.base.text import in_time
from dualtune.cli.screen import Phases, phases, width

if TYPE_CHECKING:
    from dualtune.show.view.follow import WatchedRun


@click.command("watch")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=2.0, show_default=True, metavar="SECONDS",
    help="Seconds between two reads of the files.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option("--wait", is_flag=True, help="Keep watching after the run has stopped, until Ctrl-C: it may be resumed.")
@click.option("--serve", is_flag=True, help="Also serve the page of `dualtune report` to a browser on this machine.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8100, show_default=True,
    help="The port of --serve; 0 is any free port.",
)  # fmt: skip
def command(run: Path, every: float, once: bool, wait: bool, serve: bool, port: int) -> None:
    """Show the run in the directory RUN: its curve, evaluations, memory, checkpoint, samples, and the time left.

    Only files of the directory are read, so this works from another terminal, over ssh and on a network file system.
    The command ends with the run; its exit code is 0 however the run ended.
    """
    if once and (wait or serve):
        raise click.UsageError("Give --once alone: --wait and --serve keep watching.")
    from dualtune.show.view.follow import WatchedRun

    with phases() as shown:
        watched = WatchedRun(run, shown.tell)
        watched.read()
        goes_on = not once and (watched.is_running or wait or serve)
        if goes_on and not shown.is_live:
            _tell_state(watched, shown)
        with _served(watched, port, shown) if serve else nullcontext(), suppress(KeyboardInterrupt):
            while goes_on:
                _show(watched, shown)
                time.sleep(every)
                watched.read()
                goes_on = watched.is_running or wait or serve
        shown.panel = ()
        _tell_state(watched, shown)


def _show(watched: WatchedRun, shown: Phases) -> None:
    """Draw the state on a terminal; a pipe gets only the new lines, which are printed as they are read."""
    from dualtune.show.view.lines import panel

    if not shown.is_live:
        return
    view, silent = watched.view, watched.silent_s or 0.0
    shown.panel = tuple(panel(view, width(), time.time()))
    shown.begin("training" if watched.is_running else watched.state, since=time.monotonic() - silent)
    seconds = view.seconds_left
    fields = (f"last row {in_time(silent)} ago",)
    remaining = max(0.0, seconds - silent) if watched.is_running and seconds is not None else 0.0
    shown.update(view.step, view.num_steps, fields, seconds_left=remaining)


def _tell_state(watched: WatchedRun, shown: Phases) -> None:
    """Say what the run has done, and how it ended."""
    from dualtune.base.fields import shown as safe
    from dualtune.show.view.lines import panel

    view, seconds = watched.view, watched.view.seconds_left
    of = f"/{view.num_steps}" if view.num_steps else ""
    shown.tell(f"{'run':<11} {watched.path}, step {view.step}{of}")
    for line in panel(view, 120, time.time()):
        shown.tell(line)
    if watched.is_running:
        silent_s = watched.silent_s or 0.0
        ends = f", {in_time(max(0.0, seconds - silent_s))} left" if seconds is not None else ""
        return shown.tell(f"{'running':<11} last row {in_time(silent_s)} ago{ends}")
    return shown.tell(f"{watched.state:<11} {safe(watched.reason, 500)}".rstrip())


@contextmanager
def _served(watched: WatchedRun, port: int, shown: Phases) -> Generator[None]:
    from dualtune.show.page_server import PageServer

    try:
        server = PageServer(port, watched.path, lambda: watched.is_running)
    except OSError as error:
        raise EnvironmentFault(f"--port {port}: {error.strerror or error}. Choose another port") from error
    with server:
        threading.Thread(target=server.serve_forever, name="dualtune-page", daemon=True).start()
        shown.tell(f"{'serving':<11} http://127.0.0.1:{server.server_address[1]}/ until Ctrl-C")
        try:
            yield
        finally:
            server.shutdown()
