"""Tokens per second of a short training, beside what was predicted. The speed is reported, and never a failure."""

from __future__ import annotations

import math
import time

from dualtune.selftest.checks.engines import loaded_shape, train_on
from dualtune.selftest.checks.finding import CheckFinding, DeviceCheck, Site
from dualtune.selftest.checks.prediction import predicted_tokens_per_s

WARMUP = 3  # the first step compiles, the second records, the third is the first of its kind


def speed_check() -> DeviceCheck:
    """Return the measurement of the speed, in a process of its own."""
    return DeviceCheck("speed", "tokens per second of a short training", measure, alone=True)


def measure(site: Site) -> CheckFinding:
    """Train on the same micro-batch, as often as the sizes say."""
    shape, steps = site.sizes.speed, site.sizes.speed_steps
    engine, (batch,) = loaded_shape(site, shape)
    losses = [train_on(site, engine, batch) for _ in range(WARMUP)]
    step_s: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(train_on(site, engine, batch))
        step_s.append(time.perf_counter() - start)
    if not all(map(math.isfinite, losses)):
        return CheckFinding("failed", "a loss is not finite", {"losses": [str(loss) for loss in losses]})
    found = batch.num_tokens * steps / sum(step_s)
    predicted = predicted_tokens_per_s(site, shape)
    figures = {
        "tokens_per_s": found,
        "predicted_tokens_per_s": predicted,
        "step_s": step_s,
        "model": shape.name,
        "tokens": batch.num_tokens,
        "dtype": engine.description.dtype,
        "kernels": engine.description.kernels,
    }
    beside = "no prediction" if predicted is None else f"{found / predicted:.0%} of the predicted {predicted:,.0f}"
    words = f"{shape.name}, {batch.num_tokens} tokens a step: {found:,.0f} tokens/s; {beside}"
    return CheckFinding("passed", words, figures)
