"""The settings of predictive training: a preset, and what the config sets instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal

from dualtune.config import Config


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of `hybrid:` without `auto`. The defaults are the preset `balanced`."""

    engine: Literal["predict", "fast_forward"] = "predict"
    warmup_steps: int = 100
    full_steps: int = 20
    max_predict_steps: int = 50
    confidence_threshold: float = 0.60
    correction_interval: int = 15
    correct_steps: int = 5
    divergence_threshold: float = 3.0  # standard deviations
    max_consecutive_predicts: int = 5
    probes: int = 8  # documents in each of the two sets
    trust_region: float = 0.25  # of the distance from the start of the run
    gate: Literal["clock", "none"] = "clock"
    offload: Literal["none", "optimizer"] = "none"  # during a search

    @property
    def skips_steps(self) -> bool:
        """Whether an accepted prediction skips the steps that it stands for."""
        return self.engine == "predict"


PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        "conservative": Settings(max_predict_steps=50, confidence_threshold=0.60, correction_interval=15),
        "balanced": Settings(),
        "aggressive": Settings(max_predict_steps=75, confidence_threshold=0.55, correction_interval=10),
    }
)


def settings_of(config: Config) -> Settings:
    """Return the preset with every key that the config sets."""
    hybrid, deterministic = config.hybrid, {"gate": "none"} if config.run.deterministic else {}
    config_values = {key.name: getattr(hybrid, key.name) for key in fields(Settings)}
    chosen = {name: value for name, value in config_values.items() if value != "auto"}
    return replace(PRESETS[hybrid.preset], **(deterministic | chosen))


def step_cost(config: Config) -> float:
    """Return the cost of a full step in forward passes of its batch: forward, backward, and what is recomputed.

    A backward pass through a frozen base needs no gradient of the weights: 1.11 forward passes (counted for Mistral-7B
    with 4 documents of 4,096 tokens: 252 TFLOP forward, 280 backward); with it, 2.11. Only what the config says counts:
    a resumed run on another machine must decide alike, whatever is recomputed there.
    """
    backward = 2.11 if config.adapter.trains_model else 1.11
    recomputed = 1.0 if config.memory.checkpointing == "full" else 0.0
    return 1.0 + backward + recomputed
