"""The learning rates that a sweep tries if it is given no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualtune.config import Config
from dualtune.errors import ConfigError
from dualtune.sweep.values import Choices

# Schulman et al., "LoRA Without Regret", 2025: the best rate of LoRA is ten times that of training all weights,
# and does not depend on the rank (if alpha is 32, as by default): 10 · 5e-5 · (2000 / hidden size) ^ power,
# with a power for each family.
BASE_RATE, LORA_FACTOR, HIDDEN_SIZE = 5e-5, 10, 2000
POWERS = {"llama": 0.781, "qwen": 0.0775}
SPREAD = (1 / 3, 1, 3)


def default_rates(config: Config, model: Mapping[str, Any]) -> Choices:
    """Return learning rates around the one that is expected to be best. `model`: the base model's config.json.

    Families without a measured power get no correction for their size.
    """
    if config.train.optimizer == "sgd":
        raise ConfigError(
            "train.learning_rate: the default grid is for AdamW, and train.optimizer is sgd. Give the values to try, "
            "such as --set train.learning_rate=0.1,0.3,1"
        )
    family = str(model.get("model_type", ""))
    power = next((power for name, power in POWERS.items() if family.startswith(name)), 0.0)
    hidden = model.get("hidden_size")
    size = hidden if type(hidden) is int and hidden > 0 else HIDDEN_SIZE
    centre = BASE_RATE * (HIDDEN_SIZE / size) ** power * (1 if config.adapter.trains_model else LORA_FACTOR)
    return Choices("train.learning_rate", tuple(float(f"{centre * factor:.0e}") for factor in SPREAD))
