"""Options that several commands share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.cli.screen import Phases
    from dualtune.engine.backend import Backend


class PlatformOption(click.Option):
    """The option --platform: a value from the backends' cards, or the name of a backend."""

    def make_metavar(self, *args: Any, **keywords: Any) -> str:
        """Return the values from the cards; only `--help` calls this."""
        from dualtune.engine.card import platforms

        return "|".join(platforms())


platform_option = click.option(
    "--platform", cls=PlatformOption, default="auto", show_default=True, envvar="DUALTUNE_DEVICE", show_envvar=True,
    help="The device to use: a GPU (by number: cuda:1), the CPU, or a backend by its name.",
)  # fmt: skip
dtype_option = click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True,
    help="The precision of the weights and of the computation; auto is the best that the device supports.",
)  # fmt: skip
quantization_option = click.option(
    "--quantization", type=click.Choice(["auto", "none", "nf4", "int8", "affine4", "affine8"]), default="auto",
    show_default=True, help="How the base weights are stored in memory; auto keeps the format of the files.",
)  # fmt: skip
template_option = click.option(
    "--template", default="auto", show_default=True, metavar="auto|none|NAME|FILE",
    help="The chat template; auto is the one that the adapter was trained with, or without an adapter the model's own.",
)  # fmt: skip
temperature_option = click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="Sampling temperature; 0 is greedy decoding.",
)  # fmt: skip
top_p_option = click.option(
    "--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True,
    help="Sample from the most probable tokens whose probabilities add up to this; 1 is all tokens.",
)  # fmt: skip
top_k_option = click.option(
    "--top-k", type=click.IntRange(min=0), default=0, show_default=True,
    help="Sample from this many most probable tokens; 0 is all tokens.",
)  # fmt: skip
min_p_option = click.option(
    "--min-p", type=click.FloatRange(min=0, max=1), default=0.0, show_default=True,
    help="Sample from tokens at least this share as probable as the most probable one; 0 is all tokens.",
)  # fmt: skip
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Random seed of the sampling."
)
system_option = click.option(
    "--system", metavar="TEXT", help="The system message.  [default: the one that the adapter was trained with]"
)
no_system_option = click.option(
    "--no-system", is_flag=True, help="Send no system message, even if the adapter was trained with one."
)
machine_option = click.option(
    "--machine", "name", default="this", show_default=True, metavar="NAME",
    help="The machine to plan for, such as h100-80.",
)  # fmt: skip
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a config key, e.g. train.steps=50."
)
resume_option = click.option(
    "--resume", default="auto", show_default=True, metavar="auto|never|PATH",
    help="Resume from the newest checkpoint of the run directory (auto), from none (never), or from a checkpoint "
    "or run elsewhere (PATH).",
)  # fmt: skip
other_base_option = click.option(
    "--other-base", is_flag=True, help="Accept a base model other than the one that the adapter was trained on."
)
retries_option = click.option(
    "--retries", type=click.IntRange(0, 1000), default=5, show_default=True,
    help="Maximum number of consecutive retries without progress.",
)  # fmt: skip
config_argument = click.argument("config", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
json_file_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE",
    help="Also write the result to FILE as JSON.",
)  # fmt: skip


class ModelForm(NamedTuple):
    """How a model is loaded, and where: the values of the options of `form_options`."""

    dtype: str
    quantization: str
    platform: str

    def backend(self, *, err: bool = True) -> Backend:
        """Return the backend of the platform. ConfigError if it cannot load a model in this form."""
        from dualtune.engine.capabilities import check_value

        backend = backend_for(self.platform, err=err)
        check_value(backend, "model.dtype", self.dtype)
        check_value(backend, "model.quantization", self.quantization)
        return backend


def form_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --dtype, --quantization and --platform; the command gets them as `form`, a `ModelForm`."""

    @dtype_option
    @quantization_option
    @platform_option
    @functools.wraps(function)
    def wrapped(*args: Any, dtype: str, quantization: str, platform: str, **options: Any) -> Any:
        return function(*args, form=ModelForm(dtype, quantization, platform), **options)

    return wrapped


def sampling_options(max_tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of `Sampling`, with this default for --max-tokens; the command gets them as `sampling`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @temperature_option
        @top_p_option
        @top_k_option
        @min_p_option
        @click.option(
            "--max-tokens", type=click.IntRange(min=1), default=max_tokens, show_default=True,
            help="Maximum number of tokens per answer.",
        )  # fmt: skip
        @seed_option
        @functools.wraps(function)
        def wrapped(
            *args: Any, max_tokens: int, temperature: float, top_p: float, seed: int, top_k: int, min_p: float,
            **options: Any,
        ) -> Any:  # fmt: skip
            from dualtune.train.generation.sampling import Sampling

            return function(*args, sampling=Sampling(max_tokens, temperature, top_p, seed, top_k, min_p), **options)

        return wrapped

    return decorate


# What a name of a new directory is taken for, if it ends so: one file.
_FILES = (
    ".gguf", ".safetensors", ".bin", ".pt", ".pth", ".npz",
    ".json", ".jsonl", ".csv", ".parquet", ".zip", ".tar", ".gz", ".tgz", ".zst",
)  # fmt: skip


def directory_name(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of a new directory, as callback of an argument. ConfigError for the name of a file."""
    from dualtune.base.errors import ConfigError

    if path is not None and path.suffix.lower() in _FILES and not path.is_dir():
        name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        raise ConfigError(
            f"{name}: got {path}, the name of a file, but {context.command_path} writes several files into a new "
            f"directory. Give it a name without {path.suffix}, such as {path.with_suffix('')}"
        )
    return path


def to_json(value: Any) -> str:
    """Return JSON for other programs, in which a number that is not finite is null."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    return json.dumps(plain, indent=2)


def say_json(value: Any) -> None:
    """Print the result of a command with --json."""
    say(to_json(value))


def write_json(path: Path | None, table: Mapping[str, Any]) -> None:
    """Write a command's result to the file of its option --json, if it was given."""
    from dualtune.base.files import write_file

    if path is not None:
        write_file(path, to_json(table) + "\n")


def backend_for(platform: str, *, err: bool = False, at_once: bool = False) -> Backend:
    """Return the backend for --platform and print the choice with its reason.

    Its framework is imported when it is needed, or `at_once`: errors of the config, the model and the data come first.
    """
    from dualtune.cli.screen import phases
    from dualtune.engine.choose import PlatformChoice, choose, open_backend
    from dualtune.engine.deferred import deferred

    def opened(choice: PlatformChoice) -> Backend:
        with phases(err=err) as shown, shown.inside("importing", choice.backend):
            backend = open_backend(choice)
            if backend.world().rank == 0:
                tell_choice(shown)
                shown.finish("imported")
        return backend

    def tell_choice(shown: Phases) -> None:
        if lines:
            shown.tell(lines.pop())

    with phases(err=err) as shown:
        shown.begin("choosing", "the backend")
        choice = choose(platform)
        lines = [f"platform    {choice.platform}: {choice.reason}"]
        backend = opened(choice) if at_once else deferred(choice, opened)
        if backend.world().rank == 0:
            tell_choice(shown)
    return backend
