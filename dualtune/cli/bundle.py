"""`dualtune bundle`: one file that carries an adapter, or a run to resume, to another machine."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.base.errors import FormatError
from dualtune.base.redaction import redact
from dualtune.cli.options import json_option, say_json
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.use.transfer.bundles.bundle import BundleReport
    from dualtune.use.transfer.bundles.manifest import RequiredBinding
    from dualtune.use.transfer.bundles.signature import Trust


def binding_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add options for the required binding of a bundle; the command gets it as `required`."""

    @click.option("--name", metavar="NAME", help="Require the bundle to have this name. Default: the name of its file.")
    @click.option("--max-age", metavar="AGE", help="Refuse content that is older than this, such as 90m, 12h, 7d, 2w.")
    @functools.wraps(function)
    def wrapped(*args: Any, name: str | None, max_age: str | None, **options: Any) -> Any:
        from dualtune.use.transfer.bundles.manifest import RequiredBinding, parse_age

        required = RequiredBinding(name=name, max_age=None if max_age is None else parse_age(max_age))
        return function(*args, required=required, **options)

    return wrapped


def trust_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same options and those for the required signer; the command gets the signer as `trust`."""

    @click.option(
        "--verify-signature", "signers", type=click.Path(path_type=Path), metavar="ALLOWED_SIGNERS",
        help="Require a signature in FILE.sig by a key in this file (format: ssh-keygen(1), ALLOWED SIGNERS).",
    )  # fmt: skip
    @click.option("--identity", metavar="NAME", help="The required signer: a name in ALLOWED_SIGNERS.")
    @binding_options
    @functools.wraps(function)
    def wrapped(*args: Any, signers: Path | None, identity: str | None, **options: Any) -> Any:
        return function(*args, trust=_trust(signers, identity), **options)

    return wrapped


@click.group("bundle", cls=SuggestingGroup)
def command() -> None:
    """Pack an adapter, or a checkpoint to resume from, into one file; inspect it; unpack it elsewhere."""


@command.command("pack")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint", "step", type=int, metavar="STEP", help="Pack the checkpoint of this step instead of the newest."
)
@click.option("--adapter", is_flag=True, help="Pack the final adapter of the run instead of a checkpoint.")
@click.option(
    "--tokenizer", metavar="MODEL", help="Also pack the tokenizer files of this model, a directory or a hub id."
)
@click.option(
    "--sign", "key", type=click.Path(path_type=Path), metavar="KEY",
    help="Sign the bundle with this SSH key; the signature is written to FILE.sig.",
)  # fmt: skip
@click.option("--name", metavar="NAME", help="The name of the bundle, which readers check. Default: that of FILE.")
def pack_(
    source: Path, file: Path, step: int | None, adapter: bool, tokenizer: str | None, key: Path | None, name: str | None
) -> None:
    """Write FILE from SOURCE, a run directory (its newest valid checkpoint) or an adapter directory.

    Paths of this machine are left out, and a file that contains a secret is refused.
    """
    from dualtune.use.transfer.bundles.bundle import inspect
    from dualtune.use.transfer.bundles.pack import pack

    for note in pack(source, file, step=step, adapter=adapter, tokenizer=tokenizer, key=key, name=name).notes:
        say(f"note        {note}")
    say(inspect(file).to_text())


@command.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@trust_options
@click.pass_context
def inspect_(ctx: click.Context, file: Path, as_json: bool, trust: Trust | None, required: RequiredBinding) -> None:
    """Show what FILE holds and whether it can be trusted, without unpacking it. Exit code 6 if it cannot."""
    from dualtune.use.transfer.bundles.bundle import inspect

    try:
        report = inspect(file, trust, required)
    except FormatError as error:
        if not as_json:
            raise
        say_json({"path": str(file), "ok": False, "problem": redact(str(error))})
        ctx.exit(error.exit_code)
    return say_json(report.to_json()) if as_json else say(report.to_text())


@command.command("unpack")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("dest", type=click.Path(path_type=Path))
@trust_options
def unpack_(file: Path, dest: Path, trust: Trust | None, required: RequiredBinding) -> None:
    """Write the content of FILE to the new directory DEST, all or nothing; every file is verified."""
    from dualtune.use.transfer.bundles.bundle import unpack

    report = unpack(file, dest, trust, required)
    tell_notes(report)
    say(f"unpacked    {dest}: {len(report.bundle.files)} files, each verified by its sha256")
    say(next_step(report, dest))


def tell_notes(report: BundleReport) -> None:
    for note in report.notes:
        say(f"note        {note}")


def _trust(signers: Path | None, identity: str | None) -> Trust | None:
    from dualtune.use.transfer.bundles.signature import Trust

    if (signers is None) != (identity is None):
        raise click.UsageError("Give --verify-signature and --identity together.")
    return Trust(signers, identity) if signers is not None and identity is not None else None


def next_step(report: BundleReport, dest: Path) -> str:
    from dualtune.use.transfer.bundles.names import TEMPLATE

    if report.bundle.step is None:
        base = report.bundle.base.get("name") or "MODEL"
        words = ["dualtune", "generate", str(base), "--adapter", str(dest / "adapter"), "--prompt", "…"]
        return f"use         {shlex.join(words)}\nchat        {shlex.join(['dualtune', 'chat', str(dest)])}"
    words = ["dualtune", "train", str(dest / "config.yaml"), "--set", f"run.dir={dest}"]
    local_keys = {*report.bundle.relocate} - ({"data.template"} if TEMPLATE in report.bundle.files else set())
    settings = "".join(f" --set {key}=…" for key in sorted(local_keys))
    return f"resume      {shlex.join(words)}{settings}"
