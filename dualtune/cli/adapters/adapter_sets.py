"""What `dualtune chat` and `dualtune serve` share: several adapters, given by name, over one loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.cli.output.terminal import say

if TYPE_CHECKING:
    from dualtune.backend import Backend
    from dualtune.evaluate.adapter_set import AdapterSet


def named_directories(adapters: Sequence[str]) -> dict[str, Path]:
    """Return the directories by name. UsageError for a name that comes twice, or that is the base's."""
    found: dict[str, Path] = {}
    for given in adapters:
        name, equals, directory = given.rpartition("=")
        path = Path(directory if equals else given).expanduser()
        name = name or (path.parent.name if path.name in ("adapter", "") else path.name)
        if name in found or name == "base":
            raise click.UsageError(f"--adapter {given}: the name '{name}' is taken. Give another one: NAME={path}")
        found[name] = path
    return found


def named_base(directory: Path, *, plain: bool = False, err: bool = False) -> str:
    """Return the base that an adapter names, and say so. ConfigError if it names none that can be found by its name.

    `plain`: the base is to be merged into, so that a copy in 4 bits does not do.
    """
    from dualtune.adapter.formats.directory import read_adapter
    from dualtune.base_model import is_elsewhere, plain_name
    from dualtune.errors import ConfigError
    from dualtune.io.fields import shown

    if (name := read_adapter(directory).base_model) is None:
        raise ConfigError(f"{directory}: the adapter names no base model. Give one: --base MODEL")
    if is_elsewhere(name):
        raise ConfigError(
            f"{directory}: the adapter names its base by a path of another machine, {shown(name)}, which is not here. "
            "Give the same model here, a directory or a hub id: --base MODEL"
        )
    if plain and (better := plain_name(name)) != name:
        raise ConfigError(
            f"{directory}: the adapter names the base {shown(name)}, a copy in few bits, which nothing can be merged "
            f"into. Give the plain model that it was made of: --base MODEL, by its name --base {shown(better)}"
        )
    say(f"base        {shown(name)}: the adapter names it", err=err)
    return name


def with_named_base(model: str, adapters: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return model and adapters; of an adapter or a run in the place of the model, its base and it as the first one."""
    from dualtune.adapter.formats.directory import CONFIG_FILE, adapter_directory

    directory = adapter_directory(Path(model).expanduser())
    if not (directory / CONFIG_FILE).is_file() or (directory / "config.json").is_file():
        return model, tuple(adapters)
    return named_base(directory, err=True), (model, *adapters)


def backend_that_loads(dtype: str, quantization: str, platform: str) -> Backend:
    """Return the backend for --platform. ConfigError if it cannot load a model in this form."""
    from dualtune.capabilities import check_value
    from dualtune.cli.options import backend_for

    backend = backend_for(platform, err=True)
    check_value(backend, "model.dtype", dtype)
    check_value(backend, "model.quantization", quantization)
    return backend


def load_adapters(
    model: str, directories: Mapping[str, Path], platform: str, *, dtype: str, quantization: str, template: str
) -> tuple[AdapterSet, Backend]:
    """Load a model with its adapters on the backend for --platform, and show what is loaded."""
    from dualtune.cli.output.screen import phases

    with phases(err=True) as shown:
        backend = backend_that_loads(dtype, quantization, platform)
        from dualtune.evaluate.adapter_set import load_adapter_set

        shown.begin("loading", "the model")
        found = load_adapter_set(backend, model, directories, dtype=dtype, quantization=quantization, template=template)
    for name, loaded in found.models.items():
        if loaded.note:
            say(f"template    {name}: {loaded.note}", err=True)
    return found, backend
