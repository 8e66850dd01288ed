"""`dualtune verify`: whether an adapter computes here what it computed where it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base.errors import FormatError
from dualtune.cli.adapter_sets import base_of
from dualtune.cli.bundle import binding_options
from dualtune.cli.options import ModelForm, form_options, json_option, say_json
from dualtune.cli.screen import check_table, phases, tell

if TYPE_CHECKING:
    from dualtune.use.transfer.bundles.manifest import RequiredBinding


@click.command("verify")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--base", metavar="MODEL",
    help="The base model: a directory or a hub id.  [default: the one that the adapter names]",
)  # fmt: skip
@binding_options
@form_options
@click.option(
    "--with", "library", metavar="LIBRARY",
    help="Let another library compute (peft or mlx-lm), in float32, as its users load the directory.",
)  # fmt: skip
@json_option
@click.pass_context
def command(
    ctx: click.Context, directory: Path, base: str | None, required: RequiredBinding, form: ModelForm,
    library: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare what the adapter directory DIR and its base compute here with what dualtune.json recorded.

    DIR may also be a directory that `dualtune pull` unpacked; the name and date of its bundle are then shown.

    Exit code 0 if it is the same function within the tolerance of the precisions, 6 if it is not or if there is nothing
    to compare with.
    """
    from dualtune.model.formats.directory import adapter_directory
    from dualtune.use.transfer.bundles import manifest

    if library is not None and form != ("auto", "auto", "auto"):
        raise click.UsageError("--dtype, --quantization and --platform have no effect with --with; remove them.")
    # The adapter names its base, but a bundle may not be the required one: that is checked first.
    if base is None:
        path, _ = manifest.find(adapter_directory(directory), required)
        base = base_of(None, [path], option="--base MODEL")
    with phases(err=as_json) as shown:
        shown.begin("checking", "the adapter and its base")
        from dualtune.engine.backend import Backend
        from dualtune.use.verify.verify import verify

        def open_backend() -> Backend:
            backend = form.backend(err=as_json)
            shown.begin("computing", "what was recorded")
            return backend

        result = verify(
            directory,
            base,
            open_backend,
            dtype=form.dtype,
            quantization=form.quantization,
            required=required,
            library=library,
        )
    if as_json:
        say_json(result.to_json())
    else:
        tell(check_table(result.checks))
        tell(f"\nverdict: {result.verdict}: {result.sentence}")
    ctx.exit(0 if result.ok else FormatError.exit_code)
