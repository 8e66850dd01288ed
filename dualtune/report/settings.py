"""The config of a run beside the defaults, and the configs of several runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dualtune.config.schema import sections
from dualtune.train.state import configs

Table = Mapping[str, Mapping[str, Any]]
MAX_SHOWN = 300  # characters of a value
ABSENT = "–"


def changed(config: Table) -> list[tuple[str, str, str]]:
    """Return (key, value, default) of each value that is not the default; the default of a required key is empty."""
    defaults = _defaults()
    return [
        (key, shown_value(value), shown_value(defaults[key]) if key in defaults else "")
        for key, value in flat(config).items()
        if key not in defaults or value != defaults[key]
    ]


def differing(given: Sequence[Table]) -> list[tuple[str, list[str]]]:
    """Return (key, its value in each config) of the keys with different values. A key that is not set has a dash."""
    tables = [flat(config) for config in given]
    keys = configs.differing(tables)
    return [(key, [shown_value(table[key]) if key in table else ABSENT for table in tables]) for key in keys]


def flat(config: Table) -> dict[str, Any]:
    """Return the values by their dotted keys."""
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def shown_value(value: Any) -> str:
    """Return a value as a config writes it, in bounded length."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _defaults() -> dict[str, Any]:
    """Return the defaults by their dotted keys, with lists for tuples, as YAML has them."""
    return {
        f"{section}.{key}": json.loads(json.dumps(field.default))
        for section, model in sections().items()
        for key, field in model.model_fields.items()
        if not field.is_required()
    }
