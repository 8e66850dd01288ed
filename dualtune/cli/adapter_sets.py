"""What `dualtune chat` and `dualtune serve` share: several adapters, given by name, over one loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base.errors import ConfigError
from dualtune.base.files import expanded
from dualtune.cli.options import ModelForm
from dualtune.cli.screen import phases
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.engine.backend import Backend
    from dualtune.use.chat import AdapterSet


def named_directories(adapters: Sequence[str]) -> dict[str, Path]:
    """Return the directories by name. UsageError for a name that comes twice, or that is the base's."""
    directories: dict[str, Path] = {}
    for argument in adapters:
        name, equals, directory = argument.rpartition("=")
        path = expanded(directory if equals else argument)
        name = name or (path.parent.name if path.name in ("adapter", "") else path.name)
        if name in directories or name == "base":
            raise click.UsageError(f"--adapter {argument}: the name '{name}' is taken. Give another one: NAME={path}")
        directories[name] = path
    return directories


def model_or_adapter(model: str | None, adapters: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return model and adapters; an adapter or a run in the place of the model is the first adapter of no model yet."""
    from dualtune.model.formats.directory import CONFIG_FILE, adapter_directory

    if model is None:
        return None, tuple(adapters)
    directory = adapter_directory(expanded(model))
    if not (directory / CONFIG_FILE).is_file() or (directory / "config.json").is_file():
        return model, tuple(adapters)
    return None, (model, *adapters)


def base_of(
    model: str | None, adapters: Sequence[Path], *, option: str = "MODEL", plain: bool = False, err: bool = True
) -> str:
    """Return the model, or else the base that the adapters name, and say so.

    `option`: how the model is given. `plain`: the base is to be merged into, so that a copy in 4 bits does not do.
    ConfigError if an adapter names no base that can be found by its name, or if they name different ones.
    """
    from dualtune.base.fields import shown

    if model is not None:
        return model
    if not adapters:
        raise click.UsageError(f"Give {option}, or an --adapter, which names its base.")
    names = {path: _named_base(path, option, plain) for path in adapters}
    if len(different := set(names.values())) > 1:
        listed = ", ".join(f"{path}: {shown(name)}" for path, name in names.items())
        raise ConfigError(f"the adapters name different base models ({listed}). Give one: {option}")
    name = different.pop()
    say(f"base        {shown(name)}: the adapter names it", err=err)
    return name


def _named_base(directory: Path, option: str, plain: bool) -> str:
    from dualtune.base.fields import shown
    from dualtune.model.base_model import is_elsewhere, plain_name
    from dualtune.model.formats.directory import read_adapter

    if (name := read_adapter(directory).base_model) is None:
        raise ConfigError(f"{directory}: the adapter names no base model. Give one: {option}")
    if is_elsewhere(name):
        raise ConfigError(
            f"{directory}: the adapter names its base by a path of another machine, {shown(name)}, which is not here. "
            f"Give the same model here, a directory or a hub id: {option}"
        )
    if plain and (better := plain_name(name)) != name:
        raise ConfigError(
            f"{directory}: the adapter names the base {shown(name)}, a copy in few bits, which nothing can be merged "
            f"into. Give the plain model that it was made of: {option}, by its name --base {shown(better)}"
        )
    return name


def system_messages(
    message: str | None, trained: Mapping[str, Path], *, no_system: bool, chats: bool = True
) -> dict[str, str | None]:
    """Return the system message for each name: the given one, or that of its training, which is printed.

    `chats`: what follows has a chat template. The base of several adapters has the message of the first one.
    """
    from dualtune.base.fields import shown
    from dualtune.data.system_message import trained_system_message

    if message is not None and no_system:
        raise click.UsageError("Give --system or --no-system, not both.")
    if message is not None or no_system or not chats:
        return dict.fromkeys(("base", *trained), message)
    messages = {name: trained_system_message(path) for name, path in trained.items()}
    for name, text in messages.items():
        if text is not None:
            say(f"system      {name}: {shown(text, 60)} (of its training; --no-system leaves it out)", err=True)
    return {"base": next(iter(messages.values()), None)} | messages


def load_adapters(
    model: str, directories: Mapping[str, Path], form: ModelForm, template: str
) -> tuple[AdapterSet, Backend]:
    """Load a model with its adapters, and show what is loaded."""
    with phases(err=True) as shown:
        backend = form.backend()
        from dualtune.use.chat import load_adapter_set

        shown.begin("loading", "the model")
        adapter_set = load_adapter_set(
            backend, model, directories, dtype=form.dtype, quantization=form.quantization, template=template
        )
    for name, loaded in adapter_set.models.items():
        if loaded.note:
            say(f"template    {name}: {loaded.note}", err=True)
    return adapter_set, backend
