"""`dualtune`: the group of commands, which are imported when called, and the mapping of errors to exit codes."""

from __future__ import annotations

import errno
import importlib
import io
import sys
import traceback
from types import TracebackType

import click

from dualtune.base.errors import DiskError, DualtuneError, FormatError, Preempted
from dualtune.base.redaction import redact
from dualtune.base.versions import VERSION
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import help_width, prepare_streams, say

UNREADABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)  # the user's to solve, wherever a path is first looked at
# name -> (module in dualtune.cli, one line for the list of commands)
COMMANDS = {
    "check-gpu": ("check_gpu", "Show what this machine is and whether it can train."),
    "check-env": ("check_env", "Check that everything is installed that a machine of a kind needs."),
    "selftest": ("selftest", "Test what only this device can show, and write an archive to send back."),
    "check-config": (
        "check_config",
        "Check a config against the machine, the model and the data, before any download.",
    ),
    "plan": ("plan", "Plan the memory and time of a run, and the cheapest changes with which it fits."),
    "quantize": ("quantize", "Measure what each quantization of the base costs in loss, on rows of a config."),
    "check-data": ("check_data", "List the rows of a file, or of a config's data, that cannot be used."),
    "data": ("data", "Clean data sets: remove duplicate rows, report personal data."),
    "preview": ("preview", "Show what a config would train on, with statistics."),
    "distill": ("distill", "Record a teacher's distributions on a config's data, for distillation."),
    "train": ("train", "Train an adapter from a config, or run the demo."),
    "sweep": ("sweep", "Train a config with several values of its keys, and compare the runs."),
    "bench": ("bench", "Measure what a step of a config costs here, and where its time goes."),
    "validate": ("validate", "Test that the whole pipeline works on this machine, in five tiers."),
    "launch": (
        "launch",
        "Train from a config in several processes: here, on other machines, or through Slurm.",
    ),
    "eval": ("eval", "Measure an adapter on held-out data."),
    "generate": ("generate", "Continue a prompt with a model and its adapter."),
    "chat": ("chat", "Talk to a model, with its adapters and without."),
    "export": (
        "export",
        "Write a model with its adapter for other programs: GGUF, Ollama, LM Studio and more.",
    ),
    "serve": ("serve", "Answer HTTP requests in the form of OpenAI's API."),
    "tunnel": (
        "tunnel",
        "Run a command on another machine over ssh: its port here, what it saves brought home.",
    ),
    "runs": ("runs", "List run directories with their numbers and verdict; compare runs, clean up."),
    "track": ("track", "Send the numbers of a run to a tracker: trackio, W&B, MLflow or TensorBoard."),
    "report": ("report", "Write runs as one page for a browser: verdict, curves, data, what to do next."),
    "watch": ("watch", "Show a run in progress, from another terminal, over ssh or in a browser."),
    "profile": ("profile", "Show where the memory of a run went: peak, phases, spikes and leaks."),
    "memory": ("memory", "Measure what each memory technique saves and costs here, against the plan."),
    "hybrid": ("hybrid", "Compare predictive training, averages and schedule-free AdamW at equal cost."),
    "checkpoints": ("checkpoints", "List and verify the checkpoints of a run."),
    "verify": ("verify", "Compare what an adapter computes here with what was recorded where it was trained."),
    "bundle": ("bundle", "Pack an adapter or a checkpoint into one file, inspect it, unpack it."),
    "push": (
        "push",
        "Copy an adapter or a run to another machine, a directory, a bucket or the Hugging Face Hub.",
    ),
    "pull": ("pull", "Fetch what push copied to a remote, and verify it."),
    "adapter": ("adapter", "Inspect, convert, import, compare and merge adapter directories."),
    "config": ("config", "Print a commented config with every key, an example by name, or the JSON schema."),
}


class LazyGroup(SuggestingGroup):
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
@click.version_option(VERSION, prog_name="dualtune")
def cli() -> None:
    """Fine-tune language models with LoRA and QLoRA, on Apple silicon and on NVIDIA GPUs, from one config."""


def main() -> None:
    """Run the console script."""
    prepare_streams()
    sys.excepthook = _show_unexpected
    try:
        result = cli.main(prog_name="dualtune", standalone_mode=False, terminal_width=help_width())
        sys.exit(result if isinstance(result, int) else 0)
    except Preempted as stop:
        say(redact(f"{stop}. {stop.again}"), err=True)
        sys.exit(stop.exit_code)
    except DualtuneError as error:
        say(redact(f"Error: {error}"), err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in UNREADABLE or error.filename is None:
            raise
        say(redact(f"Error: {error.filename}: {error.strerror}"), err=True)
        sys.exit(DiskError.exit_code)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        say(redact(shown.getvalue().rstrip("\n")), err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as stop:
        interrupt = stop.__cause__ if isinstance(stop, click.Abort) else stop
        left = interrupt.args if isinstance(interrupt, KeyboardInterrupt) else ()  # what a run says of itself
        say(redact(" ".join(["Interrupted.", *left])), err=True)
        sys.exit(130)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of pyo3, which Exception does not include
            raise
        say(redact(f"Error: a library in Rust failed on a file that it was given: {error}"), err=True)
        sys.exit(FormatError.exit_code)


def _show_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show the traceback of an exception that is our bug, with secrets redacted."""
    say(redact("".join(traceback.format_exception(kind, error, trace)).rstrip("\n")), err=True)


if __name__ == "__main__":
    main()
