"""What `dualtune push` and `dualtune pull` show while bytes travel: a bar on a terminal, else a line at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.transfer.places.patience import Patience


@contextlib.contextmanager
def transferring(verb: str, retries: int) -> Generator[Patience]:
    """The patience of a transfer whose course is shown. The bar is not there before the first bytes: ssh may ask."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from dualtune.redaction import redact
    from dualtune.transfer.places.patience import Patience

    columns = (TextColumn(f"{verb:<11}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(highlight=False), transient=True, disable=not sys.stdout.isatty())
    task = bar.add_task(verb, total=None, visible=False)

    def show(done_bytes: int, total_bytes: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

    try:
        yield Patience(retries, say=lambda line: say(redact(line), err=True), show=show)
    finally:
        bar.stop()
