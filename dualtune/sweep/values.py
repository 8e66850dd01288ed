"""Which values a sweep tries, as the command line gives them: KEY=A,B,C or KEY=LOW..HIGH."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualtune.config.reader import BadYaml, read_yaml
from dualtune.errors import ConfigError

Values = Mapping[str, Any]  # of one run, by key
MAX_RUNS = 1000
MAX_NAME = 100  # characters
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*")


@dataclass(frozen=True, slots=True)
class Choices:
    """The values of a key, at least two."""

    key: str
    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, Any]:
        """The first and the last value."""
        return self.values[0], self.values[-1]

    def __str__(self) -> str:
        return f"{self.key}: {', '.join(map(json.dumps, self.values))}"


@dataclass(frozen=True, slots=True)
class Range:
    """The lowest and the highest value of a key; integers if both are. Only for a sampler."""

    key: str
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return self.low, self.high

    def __str__(self) -> str:
        return f"{self.key}: {self.low:g} to {self.high:g}{', by its logarithm' if self.is_log else ''}"

    @property
    def is_log(self) -> bool:
        """Return whether values are drawn by their logarithm, as those of learning rates should be."""
        return self.low > 0 and self.high >= 10 * self.low


def read_values(overrides: Sequence[str]) -> tuple[dict[str, str], list[Choices | Range]]:
    """Return the overrides with one value, which all runs share, by key; and what the others try. The last one wins.

    ConfigError for a range whose ends are not in order, and for a value that a key has twice.
    """
    fixed, varied = dict[str, str](), dict[str, Choices | Range]()
    for override in overrides:
        key, _, text = override.partition("=")
        key = key.strip()
        fixed.pop(key, None)
        varied.pop(key, None)
        if found := _range(key, text) or _choices(key, text):
            varied[key] = found
        else:
            fixed[key] = override
    if "run.dir" in varied:
        raise ConfigError("run.dir: each run of a sweep gets a directory of its own; give the sweep's as --dir")
    return fixed, [*varied.values()]


def _range(key: str, text: str) -> Range | None:
    if (ends := _RANGE.fullmatch(text)) is None:
        return None
    is_int = all(re.fullmatch(r"[-+]?\d+", end) for end in ends.groups())
    low, high = (int(end) if is_int else float(end) for end in ends.groups())
    if not low < high:
        raise ConfigError(f"--set {key}: got the range {text.strip()}, whose first end must be the lower one")
    return Range(key, low, high)


def _choices(key: str, text: str) -> Choices | None:
    try:
        found = read_yaml(f"[{text}]", f"--set {key}", with_lines=False)
    except BadYaml:
        return None
    values = cast(list[Any], found.data)
    if found.problems or len(values) < 2:
        return None
    if twice := [value for value, count in Counter(map(json.dumps, values)).items() if count > 1]:
        raise ConfigError(f"--set {key}: has the value {twice[0]} twice")
    return Choices(key, tuple(values))


def grid(varied: Sequence[Choices]) -> list[Values]:
    """Return every combination of the values, the last key changing fastest. ConfigError if there are too many."""
    combinations = itertools.product(*(choices.values for choices in varied))
    found: list[Values] = [
        dict(zip((choices.key for choices in varied), values, strict=True))
        for values in itertools.islice(combinations, MAX_RUNS + 1)
    ]
    if len(found) > MAX_RUNS:
        raise ConfigError(f"the grid has more than {MAX_RUNS} runs. Give fewer values, or let --trials N choose N runs")
    return found


def overrides_of(values: Values) -> list[str]:
    """Return the values as overrides of a config."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]  # JSON is YAML


def names_of(runs: Sequence[Values]) -> list[str]:
    """Return a name for each run from its values, such as learning_rate=0.0003,rank=8: usable as a directory."""
    keys = {key for values in runs for key in values}
    ends = Counter(_end(key) for key in keys)
    names = [
        ",".join(f"{key if ends[_end(key)] > 1 else _end(key)}={_text(value)}" for key, value in values.items())
        for values in runs
    ]
    counts = Counter(name[:MAX_NAME].lower() for name in names)  # some file systems ignore the case
    return [
        name if len(name) <= MAX_NAME and counts[name.lower()] == 1 else f"{name[:MAX_NAME]}-{_digest(values)}"
        for name, values in zip(names, runs, strict=True)
    ]


def _end(key: str) -> str:
    return key.rpartition(".")[2]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_text, cast(list[Any], value)))
    if isinstance(value, str):
        text = Path(value).name or value
    else:
        text = f"{value:g}" if isinstance(value, float) else json.dumps(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "-"


def _digest(values: Values) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
