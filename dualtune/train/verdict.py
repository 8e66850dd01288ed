"""The verdict on what a run has recorded: on its losses (`health.py`), the rewards of its samples, and its routers.

A reward gets what it asks for, and cannot say what it should have asked for. Seen here are a reward that fails, one
that does not tell answers apart, one of several that falls while another rises, and answers that have become all alike
without a gain, or with one although the prompts differ. Any other single reward that asks for the wrong thing is not
seen: the report shows the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dualtune.engine.routing import BUSIEST
from dualtune.train.health import RunVerdict, judge
from dualtune.train.state.metrics import History

LEAST_STEPS = 3
MOST_FAILED = 0.1  # share of the samples
EQUAL = 0.99  # share of the prompts whose samples all got the same
FALL = 0.5  # of a reward's best: as much below it at the end is a fall
RISE = 0.1  # of a reward's largest value
SAME, DIFFERENT = 0.8, 0.4  # shares of the answers to different prompts that are one text: at the end, at the start
COLLAPSED = 0.1  # of the entropy at the start
NARROWED = 2.0  # times the share that a layer's busiest expert had at the start
WINDOWS = 5  # of the steps, whose means are compared

Steps = Mapping[str, Sequence[float]]  # a metric of the samples -> its value in each step; NaN where a row has none


def verdict_of(history: History) -> RunVerdict:
    """Judge a run by what it has recorded so far."""
    evals = {step: record.eval_loss for step, record in history.evals.items()}
    against = of_rewards(history.measured, history.metrics) or of_routers(history.measured)
    return judge(history.losses, evals, history.metrics, against)


def of_rewards(steps: Steps, evals: Sequence[Mapping[str, float]]) -> RunVerdict | None:
    """Return what the loss of a run that learns from its samples does not show. `evals`: the metrics of each."""
    if (failing := _failing(steps)) or len(steps.get("reward", ())) < LEAST_STEPS:
        return failing
    return _constant(steps) or _gamed(_curves(steps, evals)) or _same(steps) or _collapsed(steps)


def of_routers(steps: Steps) -> RunVerdict | None:
    """Return what the loss of a mixture does not show: its routers use ever fewer of the experts."""
    busiest = _means(steps.get(BUSIEST, ()))
    if len(busiest) < WINDOWS or busiest[-1] < NARROWED * busiest[0]:
        return None
    because = (
        f"the busiest expert of a layer got {busiest[0]:.0%} of its tokens at the start, {busiest[-1]:.0%} at the end"
    )
    advice = "Raise train.router_aux_loss_coef, or lower train.learning_rate"
    return RunVerdict("few experts", because, advice)


def _failing(steps: Steps) -> RunVerdict | None:
    share = float(np.nan_to_num(steps.get("failed_rewards", [0.0])).mean())
    if share <= MOST_FAILED:
        return None
    because = f"{share:.0%} of the samples have no reward, because a function failed, or returned None for each"
    return RunVerdict("rewards failed", because, "The events reward_failed of the run say which failed, and why")


def _constant(steps: Steps) -> RunVerdict | None:
    equal = _means(steps.get("equal_groups", ()))
    if not len(equal) or equal.min() < EQUAL:
        return None
    because = f"of {equal.mean():.0%} of the prompts all samples got the same reward, from which nothing is learned"
    advice = "Choose rewards that tell the answers of this model apart, easier prompts, or more rollouts.samples"
    return RunVerdict("constant reward", because, advice)


def _gamed(curves: Mapping[str, np.ndarray]) -> RunVerdict | None:
    """Return which reward has fallen since its best while another has risen."""
    for name, values in curves.items():
        best = int(values.argmax())
        if values[best] <= 0 or values[-1] >= (1 - FALL) * values[best]:
            continue
        for other, theirs in curves.items():
            if theirs[-1] - theirs[best] > RISE * np.abs(theirs).max():
                because = (
                    f"{name} has fallen from {values[best]:.3g} to {values[-1]:.3g} while {other} has risen from "
                    f"{theirs[best]:.3g} to {theirs[-1]:.3g}"
                )
                advice = "Lower the weight of the one that rose, or let it count only where the other is there too"
                return RunVerdict("gamed", because, advice)
    return None


def _same(steps: Steps) -> RunVerdict | None:
    same, reward = _means(steps.get("same_answer", ())), _means(steps["reward"])
    if len(same) < 2 or same[0] > DIFFERENT or same[-1] < SAME or not _has_risen(reward):
        return None
    because = (
        f"the reward has risen from {reward[0]:.3g} to {reward[-1]:.3g}, and {same[-1]:.0%} of answers to different "
        f"prompts are one text, which were {same[0]:.0%} at the start"
    )
    return RunVerdict("gamed", because, "Use a reward that compares an answer with its prompt or what is expected")


def _has_risen(curve: np.ndarray) -> bool:
    return bool(curve[-1] - curve[0] > RISE * np.abs(curve).max())


def _collapsed(steps: Steps) -> RunVerdict | None:
    entropy, reward = _means(steps.get("entropy", ())), _means(steps["reward"])
    if len(entropy) < 2 or entropy[-1] > COLLAPSED * entropy[0] or _has_risen(reward):
        return None
    because = (
        f"the samples have become alike: entropy {entropy[0]:.2g} -> {entropy[-1]:.2g} nats a token, while the reward "
        f"went from {reward[0]:.3g} to {reward[-1]:.3g}"
    )
    return RunVerdict("collapsed", because, "Lower train.learning_rate, or set rollouts.kl")


def _curves(steps: Steps, evals: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Return the curve of each of several rewards: of held-out prompts, or else in training."""
    names = [name for name in steps if name.startswith("reward_")]
    if len(evals) > 1 and all(f"eval_{name}" in row for row in evals for name in names):
        return {name: np.array([row[f"eval_{name}"] for row in evals]) for name in names}
    curves = {name: _means(steps[name]) for name in names}
    return curves if len({*map(len, curves.values())}) == 1 else {}


def _means(values: Sequence[float]) -> np.ndarray:
    """Return the means of a metric over windows of the steps, without the steps that lack it."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    return np.array([part.mean() for part in np.array_split(finite, min(WINDOWS, len(finite)))] if len(finite) else [])
