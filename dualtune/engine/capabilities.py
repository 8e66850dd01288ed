"""Which config values a backend honours, known before it is imported.

A file of its own, because the schema of the config takes long to import, and a card does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, get_args

from dualtune.base.errors import ConfigError
from dualtune.config import Config, get_value
from dualtune.config.schema import CheckpointedLayers
from dualtune.engine.card import INSTALLED, LAYERS, NAMES, NUMBER, SIZE
from dualtune.model.optimizer import OptimizerName

# Config keys that the engine has to honour. Keys that the core honours itself are not listed.
BACKEND_KEYS = (
    "model.dtype",
    "model.quantization",
    "model.init",
    "model.kernels",
    "adapter.method",
    "adapter.init",
    "adapter.merge_for",
    "adapter.master_weights",
    "adapter.train_modules",
    "adapter.train_rows",
    "adapter.bias",
    "data.packing",
    "train.optimizer",
    "train.schedule",
    "train.average",
    "train.embedding_learning_rate",
    "train.lora_plus_ratio",
    "train.label_smoothing",
    "train.router_aux_loss_coef",
    "train.activation_cache",
    "memory.checkpointing",
    "memory.offload",
    "memory.resident_layers",
    "memory.sharding",
    "memory.limit",
    "hybrid.offload",
    "run.deterministic",
)
# The value that is not a number.
WITH_NUMBERS = {
    "memory.resident_layers": "all", "train.lora_plus_ratio": None, "train.embedding_learning_rate": None,
    "train.label_smoothing": 0.0, "train.router_aux_loss_coef": None,
}  # fmt: skip
WITH_NAMES = ("adapter.train_modules", "adapter.train_rows")  # whose default is none
# What the core computes without the engine, of a key that a backend's card need not have: the learning rates.
OF_THE_CORE: Mapping[str, frozenset[Any]] = MappingProxyType(
    {"train.schedule": frozenset({"constant", "linear", "cosine"})}
)


class Honours(Protocol):
    """Anything that knows which values are honoured: a loaded `Backend`, or the `Card` of one."""

    @property
    def name(self) -> str: ...

    def capabilities(self) -> Mapping[str, frozenset[Any]]: ...


def check_capabilities(backend: Honours, config: Config) -> None:
    """Raise a ConfigError that names every key with a value that this backend does not honour: none is ignored."""
    problems = [_refusal(backend, key, get_value(config, key)) for key in BACKEND_KEYS]
    if problems := [problem for problem in problems if problem]:
        raise ConfigError("\n".join(problems))


def check_value(backend: Honours, key: str, value: Any) -> None:
    """Raise a ConfigError if this backend does not honour the value of one key."""
    if problem := _refusal(backend, key, value):
        raise ConfigError(problem)


def _refusal(backend: Honours, key: str, value: Any) -> str | None:
    value = LAYERS if isinstance(value, CheckpointedLayers) else value
    value = SIZE if key == "memory.limit" and value != "auto" else value
    value = NUMBER if key in WITH_NUMBERS and value != WITH_NUMBERS[key] else value
    value = NAMES if key in WITH_NAMES and value else value
    value = INSTALLED if key == "train.optimizer" and value not in get_args(OptimizerName) else value
    section, field = key.split(".")
    default = Config.model_fields[section].annotation.model_fields[field].default  # type: ignore[union-attr]
    allowed = backend.capabilities().get(key, OF_THE_CORE.get(key) or frozenset({default}))
    if value in allowed:
        return None
    values = ", ".join(sorted(_show(v) for v in allowed))
    return f"{key}: got {_show(value)}, the backend '{backend.name}' honours: {values}"


def _show(value: Any) -> str:
    if value == ():
        return "none"
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if not isinstance(value, str) else value
