"""The arms of a comparison: what each changes in the config, and why it may be impossible there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dualtune.bench.hybrid.policies import Freezing, predict_at_random
from dualtune.config import Config
from dualtune.hybrid.policy import Predictive
from dualtune.train.policies import MakePolicy

BASELINE = "baseline"
OFF = {"hybrid.enabled": False}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train. Its control is the baseline whose whole schedule has as many steps as the arm's cost buys."""

    name: str
    what: str
    changes: Callable[[Config], Mapping[str, Any]] = field(default=lambda config: {})
    policy: Callable[[int], MakePolicy] | None = None  # by the seed of the run; None: the policy of the config


def _engine(name: str) -> Callable[[Config], Mapping[str, Any]]:
    return lambda config: {"hybrid.enabled": True, "hybrid.engine": name}


def _schedule_free(config: Config) -> Mapping[str, Any]:
    rate = 1.375 * config.train.learning_rate
    return OFF | {"train.schedule": "schedule_free", "train.average": "none", "train.learning_rate": rate}


def _average(config: Config) -> Mapping[str, Any]:
    rate = 0.75 * config.train.learning_rate
    changes = {"train.schedule": "constant", "train.average": "tail", "train.average_over": 0.4}
    return OFF | changes | {"train.learning_rate": rate}


def _off(config: Config) -> Mapping[str, Any]:
    return OFF


# The rates of schedule_free and average, relative to the baseline's, are those of docs/averaging.md.
ARMS = {
    arm.name: arm
    for arm in (
        Arm(BASELINE, "the config without predictive training", _off),
        Arm("predict", "hybrid.engine: predict", _engine("predict"), lambda seed: Predictive),
        Arm("fast_forward", "hybrid.engine: fast_forward", _engine("fast_forward"), lambda seed: Predictive),
        Arm("random", "predict in random directions of equal length", _engine("predict"), predict_at_random),
        Arm("freeze", "a third of the steps after the warmup changes no weight", _off, lambda seed: Freezing),
        Arm("schedule_free", "train.schedule: schedule_free at 1.375 of the rate", _schedule_free),
        Arm("average", "a constant rate of 0.75, the mean of the last 0.4 of the weights", _average),
    )
}
