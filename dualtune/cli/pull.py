"""`dualtune pull`: fetch what `dualtune push` copied to a remote, verify it and unpack it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.cli.bundle import next_step, tell_notes, trust_options
from dualtune.cli.options import retries_option
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.use.transfer.bundles.manifest import RequiredBinding
    from dualtune.use.transfer.bundles.signature import Trust
    from dualtune.use.transfer.carry import Pulled


@click.command("pull")
@click.argument("target")
@click.argument("dest", type=click.Path(path_type=Path), required=False)
@click.option("--keep-packed", is_flag=True, help="Write the verified bundle to DEST without unpacking it.")
@trust_options
@retries_option
def command(
    target: str, dest: Path | None, keep_packed: bool, trust: Trust | None, required: RequiredBinding, retries: int
) -> None:
    """Fetch the bundle of TARGET (see `dualtune push --help`), verify it, and unpack it into the new directory DEST.

    The default of DEST is the last part of TARGET, in the current directory. To resume an interrupted pull, run it
    again.
    """
    from dualtune.cli.progress import transferring
    from dualtune.use.transfer.carry import pull

    with transferring("fetching", retries) as patience:
        pulled = pull(target, dest, keep_packed=keep_packed, trust=trust, required=required, patience=patience)
    tell_notes(pulled.report)
    say(f"pulled      {pulled.path}: {len(pulled.report.bundle.files)} files, each verified by its sha256")
    say("\n".join(_next_steps(pulled, keep_packed=keep_packed)))


def _next_steps(done: Pulled, *, keep_packed: bool) -> list[str]:
    if keep_packed:
        words = ["dualtune", "bundle", "unpack", str(done.path), str(done.path.with_suffix(""))]
        return [f"unpack      {shlex.join(words)}"]
    use = next_step(done.report, done.path)
    if done.report.bundle.step is not None:
        return [use]
    base = str(done.report.bundle.base.get("name") or "MODEL")
    words = ["dualtune", "verify", str(done.path / "adapter"), "--base", base]
    return [f"verify      {shlex.join(words)}", use]
