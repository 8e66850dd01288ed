"""Engines of `hybrid` that are a kind of optimizer or result, not a step policy: short for keys of `train`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from dualtune.config.problem import KeyPath

if TYPE_CHECKING:
    from dualtune.config.schema import Config

# What each sets in `train`, unless the config does. An average of weights is worth most where the rate stays high.
SHORT_FOR: Mapping[str, Mapping[str, str]] = {
    "schedule_free": {"schedule": "schedule_free"},
    "average": {"schedule": "constant", "average": "tail"},
}
_NOTHING = {"auto", "balanced", "none"}  # values of the other keys of `hybrid` that ask for nothing


def with_train_keys(data: Any) -> Any:
    """Return the data of a config with such an engine replaced by the keys it is short for; without one, unchanged.

    An engine that contradicts other keys stays, for `engine_conflicts`.
    """
    if not isinstance(data, dict):
        return data
    given = cast(dict[str, Any], data)
    hybrid: Any = given.get("hybrid")
    train: Any = given.get("train") or {}
    if not isinstance(hybrid, dict) or not isinstance(train, dict):
        return given
    own, named = cast(dict[str, Any], hybrid), cast(dict[str, Any], train)
    engine = own.get("engine")
    if (
        own.get("enabled") is not True
        or not isinstance(engine, str)
        or engine not in SHORT_FOR
        or _without_effect(own)
        or _contradicts(engine, named)
    ):
        return given
    return {**given, "hybrid": {}, "train": {**SHORT_FOR[engine], **named}}


def engine_conflicts(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield (key, conflicting key, message) for such an engine that could not be replaced."""
    hybrid = config.hybrid
    if not hybrid.enabled or hybrid.engine not in SHORT_FOR:
        return
    key: KeyPath = ("hybrid", "engine")
    for name in _without_effect({name: getattr(hybrid, name) for name in hybrid.model_fields_set}):
        rule = f"has no effect with hybrid.engine: {hybrid.engine}, which predicts nothing; remove it"
        yield ("hybrid", name), key, f"got {getattr(hybrid, name)}, but it {rule}"
    if _contradicts(hybrid.engine, {name: getattr(config.train, name) for name in config.train.model_fields_set}):
        short = " and ".join(f"train.{name}: {value}" for name, value in SHORT_FOR[hybrid.engine].items())
        yield key, ("train",), f"got {hybrid.engine}, which is short for {short}, but train says otherwise; remove one"


def _without_effect(hybrid: Mapping[str, Any]) -> list[str]:
    """Return the keys of `hybrid` whose values have no effect with such an engine."""
    return [name for name, value in hybrid.items() if name not in ("enabled", "engine") and value not in _NOTHING]


def _contradicts(engine: str, train: Mapping[str, Any]) -> bool:
    """Return whether keys that the config sets in `train` say something else. An average may be of either kind."""
    if engine == "average":
        return train.get("average") == "none" or train.get("schedule") == "schedule_free"
    return train.get("schedule", "schedule_free") != "schedule_free"
