"""Objectives: what a run minimizes, as a NumPy function of the log-probabilities of the targets.

An engine knows one loss, Σ −w·log p. That is enough for every other loss: by the chain rule the gradient of L(log p) is
Σ (∂L/∂log p)·∇log p, which is the gradient of the engine's loss with the weights w = −∂L/∂log p. So an objective
returns its value and these weights, and no engine needs to know it. See docs/objectives.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from dualtune.config import Config
from dualtune.config.schema import RunConfig
from dualtune.engine.backend import Batch, Engine
from dualtune.model.methods import METHODS
from dualtune.model.optimizer import TABLES, OptimizerSpec, averaging, rule_of


class TokenObjective(Protocol):
    """A loss that is any function of the log-probabilities of a micro-batch's targets."""

    def __call__(self, logprobs_BT: np.ndarray, batch: Batch, /) -> tuple[float, np.ndarray]:
        """Return the loss of a micro-batch and −∂loss/∂logprobs_BT.

        Log-probabilities and weights are float32 [B, T]. Where there is no target, log-probabilities are 0 and weights
        are ignored. The loss of a step is the sum over its micro-batches, so documents that are compared with each
        other must be in the same micro-batch.
        """
        ...


def sft(logprobs_BT: np.ndarray, batch: Batch, /) -> tuple[float, np.ndarray]:
    """Supervised fine-tuning: Σ −w·log p.

    Its weights are those of the batch and do not depend on the log-probabilities, so one call of
    `Engine.forward_backward(batch)` computes it, with one forward pass instead of two.
    """
    weights_BT = batch.target_weights_BT
    if weights_BT is None:
        weights_BT = np.ones_like(logprobs_BT)
    return -float((weights_BT * logprobs_BT).sum(dtype=np.float64)), weights_BT


def add_gradient(engine: Engine, batch: Batch, objective: TokenObjective, *, divisor: float) -> float:
    """Add the gradient of objective / divisor for this micro-batch, and return the objective's value.

    `optim_step` reports Σ −w·log p / divisor, which differs from the value of a non-linear objective: report the
    returned value instead.
    """
    values: list[float] = []

    def weigh(logprobs_BT: np.ndarray) -> np.ndarray:
        value, weights_BT = objective(logprobs_BT, batch)
        values.append(value)
        return weights_BT.astype(np.float32)

    engine.forward_backward_of(batch, weigh, divisor=divisor)
    return values[0]


# ----------------------------------------------------------------------------------------------------------------------
# Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state.


def learning_rate(config: Config, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0, of `num_steps`.

    Warm-up rises linearly and never starts at zero, because a step with rate 0 would be wasted. The first step after it
    has the peak rate. Then linear and cosine schedules decay towards zero, and would reach it one step after the last.
    """
    peak = config.train.learning_rate
    warmup = steps_of(config.train.warmup, num_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, num_steps - warmup)
    match config.train.schedule:
        case "constant" | "schedule_free":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))


def is_due(step: int, every: int | None) -> bool:
    """Return whether an action that is repeated every `every` steps is due after this step."""
    return every is not None and step % every == 0


def steps_until_due(config: RunConfig, step: int, num_steps: int) -> int:
    """Return the number of steps from `step` to the next evaluation, the next checkpoint or the end of the run."""
    intervals = (every for every in (config.eval_every, config.save_every) if every)
    return min([num_steps - step, *(every - step % every for every in intervals)])


def with_intervals(config: Config, num_steps: int, recorded: Mapping[str, Any] | None = None) -> Config:
    """Return the config with run.log_every and run.eval_every that suit a short run, where the config sets none.

    About ten lines and four evaluations, these at least ten steps apart. A resumed run keeps what is `recorded` of its
    section `run`. A predictive run keeps the defaults, because no prediction goes beyond the next evaluation.
    """
    run, defaults = config.run, {"log_every": max(1, num_steps // 10), "eval_every": max(10, math.ceil(num_steps / 4))}
    if config.hybrid.enabled:
        return config
    update = {
        key: recorded[key] if recorded and isinstance(recorded.get(key), int) else min(getattr(run, key), suited)
        for key, suited in defaults.items()
        if key not in run.model_fields_set
    }
    return config.model_copy(update={"run": run.model_copy(update=update)})


def steps_of(share: float, num_steps: int) -> int:
    """Return the number of steps of train.warmup or train.average_over: below 1 a share of them, rounded up."""
    return math.ceil(share * num_steps - 1e-9) if share < 1 else int(share)  # 0.07 · 100 is 7.000000000000001


def optimizer_spec(config: Config, num_steps: int) -> OptimizerSpec:
    """Return what updates the weights in a run of `num_steps`: the only place that reads it from a config."""
    train = config.train
    rule = rule_of(train.optimizer, train.schedule)
    changes = {"weight_decay": train.weight_decay}
    if rule == "schedule_free":
        changes["warmup_steps"] = float(steps_of(train.warmup, num_steps))
    average = averaging(train.average, steps_of(train.average_over, num_steps), num_steps)
    factors = lora_plus(config.adapter.method, train.lora_plus_ratio)
    if train.embedding_learning_rate is not None:
        factors[TABLES] = train.embedding_learning_rate / train.learning_rate
    return OptimizerSpec(rule, changes, average, factors)


def update_settings(config: Config, num_steps: int) -> dict[str, float | None]:
    """Return the constants of the updates of a run of `num_steps`: all but the learning rate."""
    return {**optimizer_spec(config, num_steps).settings, "max_grad_norm": config.train.max_grad_norm}


def lora_plus(method: str, ratio: float | None) -> dict[str, float]:
    """Return the learning-rate factors of LoRA+ (Hayou et al., arXiv 2402.12354, equation 6): `ratio` for B.

    And for what else a method has besides A, as in PEFT's `create_loraplus_optimizer`.
    """
    if ratio in (None, 1.0):
        return {}
    return {parameter.peft: ratio for parameter in METHODS[method].parameters if parameter.part != "A"}
