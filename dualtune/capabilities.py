"""Which config values a backend honours: asked before a run, and of what is not imported yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Protocol

from dualtune.config import Config, get_value
from dualtune.errors import ConfigError

ENTRY_POINT_GROUP = "dualtune.backends"
# Config keys whose meaning lies in the engine's hands. Keys that the core honours itself are not listed.
BACKEND_KEYS = (
    "model.dtype",
    "model.quantization",
    "model.init",
    "model.kernels",
    "adapter.method",
    "data.packing",
    "train.optimizer",
    "memory.checkpointing",
    "memory.offload",
    "memory.limit",
    "memory.sharding",
    "hybrid.enabled",
)


class Honours(Protocol):
    """What is asked of a backend before a run: which values it honours."""

    @property
    def name(self) -> str: ...

    def capabilities(self) -> Mapping[str, frozenset[Any]]: ...


@dataclass(frozen=True, slots=True)
class Declared:
    """A backend that is not opened, by what its package declares."""

    name: str
    honoured: Mapping[str, frozenset[Any]]

    def capabilities(self) -> Mapping[str, frozenset[Any]]:
        return self.honoured


def check_capabilities(backend: Honours, config: Config) -> None:
    """Raise a ConfigError that names every key whose value this backend does not honour: nothing is ignored."""
    problems = [problem for key in BACKEND_KEYS if (problem := _refusal(backend, key, get_value(config, key)))]
    if problems:
        raise ConfigError("\n".join(problems))


def check_value(backend: Honours, key: str, value: Any) -> None:
    """The same for one key."""
    if problem := _refusal(backend, key, value):
        raise ConfigError(problem)


def _refusal(backend: Honours, key: str, value: Any) -> str | None:
    allowed = backend.capabilities().get(key, frozenset({_default(key)}))
    if value in allowed:
        return None
    values = ", ".join(sorted(_show(v) for v in allowed))
    return f"{key}: got {_show(value)}, the backend '{backend.name}' honours: {values}"


def _default(key: str) -> Any:
    section, field = key.split(".")
    return Config.model_fields[section].annotation.model_fields[field].default  # type: ignore[union-attr]


def _show(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if not isinstance(value, str) else value


def declared(name: str) -> Declared | None:
    """What an installed backend says of itself in its capabilities.py, before its framework is imported, if it does."""
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        package = find_spec(point.module)
        if package is None or package.origin is None or find_spec(name) is None:
            continue
        spec = spec_from_file_location(f"{name}_capabilities", Path(package.origin).with_name("capabilities.py"))
        if spec is not None and spec.loader is not None and Path(str(spec.origin)).is_file():
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return Declared(name, module.CAPABILITIES)
    return None
