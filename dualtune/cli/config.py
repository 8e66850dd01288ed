"""`dualtune config`: print the commented default config (from the schema), an example, or an imported config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dualtune.base.errors import ConfigError, DualtuneError
from dualtune.base.files import write_file
from dualtune.base.text import in_columns, one_line
from dualtune.cli.options import say_json, set_option
from dualtune.cli.terminal import pass_on, say


class _Names(click.Group):
    """`import` is a command; any other word is the name of an example."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == import_.name:
            return import_
        return click.Command(cmd_name, callback=lambda: _print_example(cmd_name), add_help_option=False)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [str(import_.name)]


@click.group("config", cls=_Names, invoke_without_command=True, subcommand_metavar="[NAME | import FILE]")
@click.option("--list", "as_list", is_flag=True, help="List the example configs and what each is for.")
@click.option(
    "--schema", is_flag=True, help="Print the JSON schema of the config instead, for editors and other programs."
)
@set_option
@click.pass_context
def command(ctx: click.Context, as_list: bool, schema: bool, overrides: tuple[str, ...]) -> None:
    """Print a commented config with every key and its default: dualtune config > config.yaml

    With --set train.objective=dpo or adapter.method=full, the learning rate is the usual one beside them, and a comment
    says why. With NAME, print an example instead: dualtune config training_config_h100 > config.yaml
    """
    from dualtune.config import default_yaml, json_schema
    from dualtune.config.render import example_names, example_path, title

    if sum((ctx.invoked_subcommand is not None, as_list, schema, bool(overrides))) > 1:
        raise click.UsageError("Give only one of NAME, --list, --schema and --set.")
    if as_list:
        say(in_columns([(name, title(example_path(name))) for name in example_names()]))
    elif schema:
        say_json(json_schema())
    elif ctx.invoked_subcommand is None:
        pass_on(default_yaml(overrides))


def _print_example(name: str) -> None:
    from dualtune.config.render import example_path

    pass_on(example_path(name).read_text(encoding="utf-8"))


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from", "trainer",
    type=click.Choice(["axolotl", "mlx-lm", "LLaMA-Factory", "TRL", "Unsloth", "axolotl-rs", "mlx-lm-lora"],
                      case_sensitive=False),
    help="The trainer that FILE was written for. Default: detected by its keys.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path), help="Write the config to this new file instead of standard output."
)
def import_(file: Path, trainer: str | None, output: Path | None) -> None:
    """Translate FILE, a YAML config of axolotl, mlx-lm, mlx-lm-lora, LLaMA-Factory, TRL or Unsloth.

    Comments in the result show where every line comes from. What cannot be translated is listed with the reason, in the
    config and on standard error. Nothing is downloaded; if a key depends on the model, a local copy of it is read.
    """
    from dualtune.config.importing.translate import import_config, to_text

    if output is not None and output.exists():
        raise ConfigError(f"{output}: already exists. Choose another name or remove it")
    imported = import_config(file, trainer, _count_layers)
    text = to_text(imported)
    if output is None:
        pass_on(text)
    else:
        write_file(output, text)
        say(f"written         {output}: {len(imported.settings)} values from {imported.trainer}", err=True)
    for lost in imported.lost:
        is_key = "." in lost.reason.partition(" ")[0]
        reason = lost.reason if is_key else f"{lost.reason[0].upper()}{lost.reason[1:]}"
        say(one_line(f"not translated  {lost.key}: {lost.value}. {reason}"), err=True)


def _count_layers(model: str) -> int | None:
    """Return the number of decoder layers of a model, if its config.json is a local file or in the hub cache."""
    from dualtune.model.base_model import model_here
    from dualtune.model.config_file import read_config

    try:
        config = read_config(model_here(model) or _in_hub_cache(model))
    except DualtuneError:
        return None
    layers: Any = config.get("num_hidden_layers")
    return layers if isinstance(layers, int) and layers > 0 else None


def _in_hub_cache(model: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        path = None
    return Path(path).parent if isinstance(path, str) else Path(model)
