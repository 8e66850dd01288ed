"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from dualtune.config import Config
from dualtune.config.schema import RunConfig


def learning_rate(config: Config, step: int, num_steps: int) -> float:
    """The learning rate of step `step`, counted from 0, of `num_steps`.

    Warmup rises linearly and never starts at zero (a step with rate 0 would be wasted); the peak is reached at the
    first step after it. From there linear and cosine fall towards zero, which they would reach one step after the last.
    """
    peak = config.train.learning_rate
    warmup = warmup_steps(config.train.warmup, num_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, num_steps - warmup)
    match config.train.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def steps_until_due(config: RunConfig, step: int, num_steps: int) -> int:
    """How many steps lie between `step` and the next evaluation, checkpoint or the end of the run."""
    intervals = (every for every in (config.eval_every, config.save_every) if every)
    return min([num_steps - step, *(every - step % every for every in intervals)])


def warmup_steps(warmup: float, num_steps: int) -> int:
    """Below 1, a share of the steps (rounded up); otherwise a number of steps."""
    return math.ceil(warmup * num_steps - 1e-9) if warmup < 1 else int(warmup)  # 0.07 · 100 is 7.000000000000001
