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


def load_adapters(
    model: str, directories: Mapping[str, Path], platform: str, *, dtype: str, quantization: str, template: str
) -> tuple[AdapterSet, Backend]:
    """Load a model with its adapters on the backend for --platform, and show what is loaded."""
    from dualtune.cli.options import backend_for
    from dualtune.cli.output.screen import phases

    with phases(err=True) as shown:
        shown.begin("importing", "the backend")
        from dualtune.capabilities import check_value
        from dualtune.evaluate.adapter_set import load_adapter_set

        backend = backend_for(platform, err=True)
        check_value(backend, "model.dtype", dtype)
        check_value(backend, "model.quantization", quantization)
        shown.begin("loading", "the model")
        found = load_adapter_set(backend, model, directories, dtype=dtype, quantization=quantization, template=template)
    if found.model.note:
        say(f"template    {found.model.note}", err=True)
    return found, backend
