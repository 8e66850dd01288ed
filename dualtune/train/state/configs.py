"""The config.yaml of a run directory as flat keys, without the schema, which differs between versions."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dualtune.config.reader import BadYaml, read_yaml
from dualtune.errors import ConfigError, FormatError
from dualtune.io.untrusted import open_file
from dualtune.train.state.run_dir import CONFIG

MAX_CONFIG_CHARACTERS = 1 << 18
_CONDITION = re.compile(r"([\w.]+)\s*(<=|>=|!=|==|=|<|>)\s*(.*)", re.DOTALL)

Flat = dict[str, Any]  # section.key -> value; a list is one value


def read_flat(run_dir: Path) -> Flat:
    """Return the config of a run; empty if it cannot be read."""
    path = run_dir / CONFIG
    try:
        with io.TextIOWrapper(open_file(path, is_own=True), encoding="utf-8") as file:
            found: Any = read_yaml(file.read(MAX_CONFIG_CHARACTERS), str(path)).data
    except (FormatError, OSError, ValueError, BadYaml):
        return {}
    return dict(_flat(found)) if isinstance(found, dict) else {}


def _flat(table: Any, prefix: str = "") -> list[tuple[str, Any]]:
    items = cast("dict[Any, Any]", table).items()
    found: list[tuple[str, Any]] = []
    for key, value in items:
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def differing(configs: Sequence[Flat]) -> dict[str, list[Any]]:
    """Return the keys that do not have the same value in all configs, with the values; None where a key is absent.

    run.dir is left out: no two runs have the same.
    """
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.dir")
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


class Condition:
    """A condition on a config, such as learning_rate<=1e-4: the key may leave out its section.

    Numbers are compared as numbers, anything else as text, which knows only = and !=.
    """

    def __init__(self, text: str) -> None:
        """Raise ConfigError if the text is no condition."""
        parts = _CONDITION.fullmatch(text.strip())
        if parts is None or not parts[1].strip("."):
            raise ConfigError(f"--where: got {text!r}, allowed: KEY=VALUE, also with !=, <, <=, > or >=")
        self.key, self._operator, self._value = parts[1], parts[2].replace("==", "="), parts[3].strip()
        if self._operator[0] in "<>" and _number(self._value) is None:
            raise ConfigError(f"--where: got {text!r}, but {self._operator} needs a number")

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Return whether the condition holds for the key; of several with this ending, for any. False without one."""
        return any(map(self._compare, self._values(config)))

    def concerns(self, config: Mapping[str, Any]) -> bool:
        """Return whether the config has the key."""
        return bool(self._values(config))

    def _values(self, config: Mapping[str, Any]) -> list[Any]:
        return [value for key, value in config.items() if f".{key}".endswith(f".{self.key}")]

    def _compare(self, value: Any) -> bool:
        a, b = _number(value), _number(self._value)
        if a is None or b is None:
            is_equal = _text(value) == self._value.lower()
            return is_equal if self._operator == "=" else not is_equal if self._operator == "!=" else False
        return {"=": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[self._operator]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower()
