"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dualtune.config import Config
from dualtune.config.schema import RunConfig
from dualtune.optimizer import OptimizerSpec, rule_of
from dualtune.optimizer.averaging import averaging


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
    return OptimizerSpec(rule, changes, averaging(train.average, steps_of(train.average_over, num_steps), num_steps))
