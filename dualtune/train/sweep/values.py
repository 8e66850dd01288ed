"""Which values a sweep tries, as the command line gives them: KEY=A,B,C or KEY=LOW..HIGH."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import ConfigError
from dualtune.base.versions import import_extra
from dualtune.config import Config
from dualtune.config.load import BadYaml, read_yaml
from dualtune.config.rates import divisor_of_rate

# ----------------------------------------------------------------------------------------------------------------------
# The learning rates that a sweep tries if it is given no values.

# Schulman et al., "LoRA Without Regret", 2025: the best rate of LoRA is ten times that of training all weights,
# and does not depend on the rank (if alpha is 32, as by default): 10 · 5e-5 · (2000 / hidden size) ^ power,
# with a power for each family.
BASE_RATE, LORA_FACTOR, HIDDEN_SIZE = 5e-5, 10, 2000
POWERS = {"llama": 0.781, "qwen": 0.0775}
SPREAD = (1 / 3, 1, 3)


def default_rates(config: Config, model: Mapping[str, Any]) -> Choices:
    """Return learning rates around the one that is expected to be best. `model`: the base model's config.json.

    Families without a measured power get no correction for their size. What takes a smaller rate than LoRA with the
    loss of sft (`dualtune.config.rates`) is tried around one. ConfigError where nothing is known of it.
    """
    if (divisor := divisor_of_rate(config)) is None:
        train = config.train
        raise ConfigError(
            "train.learning_rate: no rate is known to be usual with train.optimizer: "
            f"{train.optimizer} and train.objective: {train.objective}. Give the values to try, such as "
            "--set train.learning_rate=1e-5,1e-4,1e-3"
        )
    family = str(model.get("model_type", ""))
    power = next((power for name, power in POWERS.items() if family.startswith(name)), 0.0)
    hidden = model.get("hidden_size")
    size = hidden if type(hidden) is int and hidden > 0 else HIDDEN_SIZE
    centre = BASE_RATE * LORA_FACTOR * (HIDDEN_SIZE / size) ** power / divisor
    return Choices("train.learning_rate", tuple(float(f"{centre * factor:.0e}") for factor in SPREAD))


# ----------------------------------------------------------------------------------------------------------------------
# The values of a command line, their combinations, and the names of runs.

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
        if values := _range(key, text) or _choices(key, text):
            varied[key] = values
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
        loaded = read_yaml(f"[{text}]", f"--set {key}", with_lines=False)
    except BadYaml:
        return None
    values = cast(list[Any], loaded.data)
    if loaded.problems or len(values) < 2:
        return None
    if twice := [value for value, count in Counter(map(json.dumps, values)).items() if count > 1]:
        raise ConfigError(f"--set {key}: has the value {twice[0]} twice")
    return Choices(key, tuple(values))


def grid(varied: Sequence[Choices]) -> list[Values]:
    """Return every combination of the values, the last key changing fastest. ConfigError if there are too many."""
    combinations = itertools.product(*(choices.values for choices in varied))
    runs: list[Values] = [
        dict(zip((choices.key for choices in varied), values, strict=True))
        for values in itertools.islice(combinations, MAX_RUNS + 1)
    ]
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"the grid has more than {MAX_RUNS} runs. Give fewer values, or let --trials N choose N runs")
    return runs


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


# ----------------------------------------------------------------------------------------------------------------------
# Values that optuna's TPE sampler chooses from what earlier runs have shown.

DIGITS = 3  # of a chosen number, so that a run's name says it exactly

Results = Sequence[tuple[Values, float | None]]  # the values of each run so far, and its loss; None: it failed


def sampler(varied: Sequence[Choices | Range], seed: int) -> Callable[[Results], Values]:
    """Return what chooses the values of the next run: a function of the runs so far. EnvironmentFault without optuna.

    Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011.
    """
    optuna = import_extra("optuna", "optuna", "--trials")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, Any] = {setting.key: _distribution(optuna, setting) for setting in varied}
    texts = {setting.key for setting in varied if isinstance(setting, Choices)}

    def choose(results: Results) -> Values:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed + len(results)))
        for tried, loss in results:
            params = {key: json.dumps(value) if key in texts else value for key, value in tried.items()}
            state = optuna.trial.TrialState.FAIL if loss is None else optuna.trial.TrialState.COMPLETE
            study.add_trial(optuna.create_trial(params=params, distributions=space, value=loss, state=state))
        chosen = study.ask(space).params
        return {setting.key: _value(setting, chosen[setting.key]) for setting in varied}

    return choose


def _distribution(optuna: Any, setting: Choices | Range) -> Any:
    if isinstance(setting, Choices):  # as texts, because optuna wants values without a list among them
        return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in setting.values])
    kinds = optuna.distributions
    kind = kinds.FloatDistribution if isinstance(setting.low, float) else kinds.IntDistribution
    return kind(setting.low, setting.high, log=setting.is_log)


def _value(setting: Choices | Range, chosen: Any) -> Any:
    if isinstance(setting, Choices):
        return json.loads(chosen)
    if not isinstance(setting.low, float):
        return chosen
    return min(max(float(f"{chosen:.{DIGITS}g}"), setting.low), setting.high)
