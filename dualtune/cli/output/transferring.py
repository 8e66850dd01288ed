"""What `dualtune push` and `dualtune pull` show during a transfer: a bar on a terminal, else a line at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

from dualtune.cli.output.terminal import say

if TYPE_CHECKING:
    from dualtune.transfer.remotes.patience import Patience


@contextlib.contextmanager
def transferring(verb: str, retries: int) -> Generator[Patience]:
    """Yield the `Patience` of a transfer with a progress bar. It starts with the first bytes: before, ssh may ask."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from dualtune.cli.output.console import Console
    from dualtune.text.redaction import redact
    from dualtune.transfer.remotes.patience import Patience

    columns = (TextColumn(f"{verb:<11}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(), transient=True, disable=not sys.stdout.isatty())
    task = bar.add_task(verb, total=None, visible=False)
    first_bytes: int | None = None

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal first_bytes
        first_bytes = done_bytes if first_bytes is None else first_bytes
        if done_bytes == first_bytes and not bar.live.is_started:
            return  # bytes from an earlier attempt; the connection for the rest is not open yet
        bar.start()  # has an effect only the first time
        bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

    try:
        yield Patience(retries, say=lambda line: say(redact(line), err=True), show=show)
    finally:
        bar.stop()
