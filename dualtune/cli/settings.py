"""The settings of a run on the command line: short options for the usual keys, and a config without a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.base.errors import ConfigError
from dualtune.base.files import expanded

if TYPE_CHECKING:
    from dualtune.config import Config

# option -> its key, and its help. Every other key is an option by its own name, such as --adapter.alpha 32.
SHORT = {
    "model": ("model.name", "The base model: a hub id or a directory."),
    "data": ("data.train", "The training data: a file, a directory or a hub dataset. May be repeated."),
    "steps": ("train.steps", "Number of steps to train, instead of epochs."),
    "epochs": ("train.epochs", "Number of passes over all training data."),
    "learning_rate": ("train.learning_rate", "The peak learning rate."),
    "rank": ("adapter.rank", "The rank of the adapter."),
    "max_length": ("data.max_length", "Maximum length of a document, in tokens."),
    "quantization": ("model.quantization", "The format in which the base model is stored, such as nf4 or affine4."),
    "run_dir": ("run.dir", "The run directory. Default without CONFIG: runs/MODEL-DATA."),
}
_LITERAL = ("model", "data", "run_dir")  # texts, which are not read as YAML


def short_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the short options, whose values the command gets by their names in SHORT; None or () if not given."""
    for name, (key, text) in reversed(SHORT.items()):
        option = click.option(f"--{name.replace('_', '-')}", multiple=name == "data", metavar=key, help=text)
        command = option(command)
    return command


def with_short_options(
    short: Mapping[str, str | Sequence[str] | None], overrides: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the short options that were given as overrides `section.key=value`, before these overrides.

    UsageError for a key that both have: which of the two counts would be a guess. ConfigError for an empty value.
    """

    def text(name: str, value: str | Sequence[str]) -> str:
        if isinstance(value, str):
            return json.dumps(value) if name in _LITERAL else value  # JSON is YAML
        return json.dumps(value[0] if len(value) == 1 else list(value))

    values = {name: value for name, value in short.items() if value is not None and value != ()}
    for name, value in values.items():
        option, key = f"--{name.replace('_', '-')}", SHORT[name][0]
        if "" in ([value] if isinstance(value, str) else value):
            raise ConfigError(f"{option}: got an empty text. Give a value (is a variable of the shell unset?)")
        if key in _keys(overrides):
            raise click.UsageError(f"{option} sets {key}, which is also set by its name. Give one of them.")
    return (*(f"{SHORT[name][0]}={text(name, value)}" for name, value in values.items()), *overrides)


def config_from_options(overrides: Sequence[str]) -> Config | None:
    """Return the config that these overrides make without a file, or None if they do not name model and data.

    The default run directory is named after both, so that the same command resumes its run.
    """
    from dualtune.config import load_config

    keys = _keys(overrides)
    if not {"model.name", "data.train"} <= keys.keys():
        return None
    empty: dict[str, Any] = {"model": {"name": ""}, "data": {"train": ""}, "run": {"dir": ""}}
    if "run.dir" in keys:
        return load_config(empty, overrides)
    config = load_config(empty, [*overrides, "run.dir=runs/unnamed"])
    stems = (_place(config.model.name).name, _place(config.data.sources()[0].path).stem)
    name = "-".join(re.sub(r"[^\w.-]+", "-", stem).strip("-.") for stem in stems)
    return load_config(empty, [*overrides, f"run.dir=runs/{name}"])


def _keys(overrides: Sequence[str]) -> dict[str, None]:
    """Return the keys that are set, in their order."""
    return dict.fromkeys(override.partition("=")[0].strip() for override in overrides)


def _place(name: str) -> Path:
    """Return a path whose last part is a name, also for `.` and `..`; links keep theirs."""
    return Path(os.path.abspath(expanded(name)))  # noqa: PTH100


def described(config: Config, overrides: Sequence[str]) -> str:
    """Return what a config without a file consists of."""
    from dualtune.config import get_value
    from dualtune.config.render import entry

    keys = _keys([*overrides, "run.dir"])
    return ", ".join(f"{key}: {entry('', get_value(config, key)).strip(' :')}" for key in keys)
