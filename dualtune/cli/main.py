"""`dualtune`: the group of commands, loaded when they are called, and the place where errors become exit codes."""

from __future__ import annotations

import importlib
import sys

import click

import dualtune
from dualtune.errors import DualtuneError

# name -> (module in dualtune.cli, one line for the list of commands)
COMMANDS = {
    "check-gpu": ("check_gpu", "Say what this machine is and whether it can train."),
    "train": ("train", "Train an adapter by a config, or show the demo."),
    "eval": ("eval", "Measure an adapter on held-out data."),
    "generate": ("generate", "Continue a prompt with a model and its adapter."),
    "adapter": ("adapter", "Inspect and convert adapter directories."),
    "config": ("config", "Print a commented config with every key, or its JSON schema."),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"dualtune.cli.{COMMANDS[cmd_name][0]}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(dualtune.__version__, prog_name="dualtune")
def cli() -> None:
    """Fine-tune language models with LoRA and QLoRA, on Apple silicon and on NVIDIA GPUs, from one config."""


def main() -> None:
    """The console script."""
    try:
        result = cli.main(prog_name="dualtune", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except DualtuneError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
