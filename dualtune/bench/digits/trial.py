"""One run on the images of digits: trained through the step policy of its config, then measured on held-out images."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dualtune.bench.digits.data import DigitsData
from dualtune.bench.digits.network import STEP_COST, DigitsEngine, accuracy, losses, starting_weights
from dualtune.bench.digits.step import DigitsCourse, DigitsStep
from dualtune.config import Config, load_config
from dualtune.hybrid.policy import Predictive
from dualtune.train.policies import POLICIES, chosen
from dualtune.train.schedule import optimizer_spec

BATCH = 64  # images
REPORTED = ("attempts", "accepted", "undone", "divergences", "backward_reduction_pct", "disabled")


@dataclass(frozen=True, slots=True)
class DigitsTrial:
    """What a run cost, and what came of it. Costs are in forward passes of a batch."""

    seed: int
    steps: int  # of the schedule
    accuracy: float  # on held-out images, from 0 to 1
    eval_loss: float  # on the same images, in nats
    cost: float
    wall_s: float
    peak_bytes: int  # that the run has allocated at once, by tracemalloc: arrays and Python's objects, not the images
    hybrid: Mapping[str, Any] = field(default_factory=lambda: {})  # what predictive training reports; empty without it

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "hybrid" or value}


def config_of(seed: int, num_steps: int, learning_rate: float, hybrid: Mapping[str, Any]) -> Config:
    """Return the config of a run, with the default schedule and optimizer. Model and data in it are only names."""
    train = {"steps": num_steps, "documents_per_step": BATCH, "learning_rate": learning_rate, "max_grad_norm": None}
    names = {"model": {"name": "digits"}, "data": {"train": "digits"}, "adapter": {"method": "full"}}
    return load_config({**names, "train": train, "run": {"seed": seed, "dir": "digits"}, "hybrid": dict(hybrid)})


def train(data: DigitsData, config: Config) -> tuple[DigitsEngine, float, Mapping[str, Any]]:
    """Train, and return the engine, the cost of the run, and what predictive training reports of itself."""
    policy, num_steps = POLICIES[chosen(config)](config), config.train.steps
    assert num_steps is not None
    engine = DigitsEngine(starting_weights(config.run.seed), optimizer_spec(config, num_steps))
    course = DigitsCourse(config, data.train, engine, policy.num_probes)
    done = 0
    while done < num_steps:
        done += policy.take(DigitsStep(course, done)).num_steps
    if not isinstance(policy, Predictive):
        return engine, num_steps * STEP_COST, {}
    # The controller decides by the costs of a language model. What is reported are those of this network.
    found = replace(policy.statistics(), step_cost=STEP_COST)
    return engine, found.cost, {name: found.as_json()[name] for name in REPORTED}


def run_trial(data: DigitsData, config: Config) -> DigitsTrial:
    """Train twice, with the same result: once by the clock, and once with all allocations counted, which is slower."""
    began = time.perf_counter()
    engine, cost, hybrid = train(data, config)
    seconds = time.perf_counter() - began
    tracemalloc.start()
    try:
        train(data, config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert config.train.steps is not None
    found = accuracy(engine.weights, data.held_out), float(losses(engine.weights, data.held_out).mean())
    return DigitsTrial(config.run.seed, config.train.steps, *found, cost, seconds, peak, hybrid)
