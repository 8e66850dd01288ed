"""`dualtune push`: copy an adapter, or a run to resume, to another machine, a directory, a bucket or the hub."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.base.text import in_bytes
from dualtune.cli.options import retries_option
from dualtune.cli.terminal import say


@click.command("push")
@click.argument("target")
@click.argument("source", type=click.Path(path_type=Path), required=False)
@click.option(
    "--checkpoint", "step", type=int, metavar="STEP", help="Push the checkpoint of this step instead of the newest."
)
@click.option("--adapter", is_flag=True, help="Push the final adapter of the run; the default if the run has ended.")
@click.option("--run", "to_resume", is_flag=True, help="Push the newest checkpoint, even if the run has ended.")
@click.option(
    "--tokenizer", metavar="MODEL", help="Also push the tokenizer files of this model, a directory or a hub id."
)
@click.option(
    "--sign", "key", type=click.Path(path_type=Path), metavar="KEY", help="Sign the bundle with this SSH key."
)
@click.option("--force", is_flag=True, help="Replace what TARGET already holds.")
@click.option("--public", is_flag=True, help="hf:// only: create a public repository instead of a private one.")
@retries_option
def command(
    target: str, source: Path | None, step: int | None, adapter: bool, to_resume: bool, tokenizer: str | None,
    key: Path | None, force: bool, public: bool, retries: int,
) -> None:  # fmt: skip
    """Copy SOURCE to TARGET: a run directory, an adapter directory or a bundle.

    A run that has ended sends its adapter; any other run sends its newest valid checkpoint, to be resumed there.

    TARGET is one of

    \b
    user@host:path           another machine, over ssh; it needs no dualtune
    ssh://user@host:22/path
    path                     a directory
    s3://bucket/path         and other file systems of fsspec
    hf://owner/name          the Hugging Face hub: the adapter and a model card

    The default of SOURCE is the most recently written run in runs/. A TARGET that ends in .tar or .dualtune names
    the bundle; any other is a directory for bundle.tar. To resume an interrupted push, run it again.
    """
    from dualtune.cli.progress import transferring
    from dualtune.use.transfer.carry import PushRequest, newest_run, push, sends_adapter

    if source is None:
        source = newest_run()
        say(f"source      {source}: the run in runs/ that was written to last")
    choice = PushRequest(source, step, adapter, tokenizer, key, to_resume)
    if sends_adapter(choice):
        say(f"sending     the adapter of {source}: the run has ended. To resume it, send its checkpoint: --run")
    with transferring("sending", retries) as patience:
        done = push(target, choice, force=force, public=public, patience=patience)
    for note in done.notes:
        say(f"note        {note}")
    pushed = done.report.bundle
    content = pushed.kind if pushed.step is None else f"{pushed.kind} after step {pushed.step}"
    state = "sent" if done.is_new else "unchanged"
    say(f"{state:<11} {done.where}: {content}, {in_bytes(done.report.num_bytes)}, digest {pushed.digest}")
    say(f"pull        dualtune pull {target}")
