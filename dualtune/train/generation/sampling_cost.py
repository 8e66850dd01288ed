"""What drawing the samples of a step takes by formula: the memory of its cache, and the least time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualtune.base.text import in_bytes, in_short_time
from dualtune.config import Config
from dualtune.config.values import ON_POLICY, POLICY_OBJECTIVES
from dualtune.engine.machines import MachineLimits
from dualtune.engine.memory.plan import MemoryPlan
from dualtune.engine.memory.serving import cache_bytes
from dualtune.engine.memory.shapes import Decoder
from dualtune.train.generation.batched import MOST_ROWS, MOST_TOKENS


@dataclass(frozen=True, slots=True)
class SamplingCost:
    """The cost of sampling in one step. The gradient is computed afterwards, in the memory of the cache."""

    answers: int
    at_once: int
    max_tokens: int
    cache_bytes: int  # keys and values of all layers, where all answers are as long as they may be, and those held
    total_bytes: int  # with what is in memory beside it
    has_bytes: int
    least_s: float | None  # each token reads all weights once, and computes with them; None: no limits are known

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.has_bytes

    def __str__(self) -> str:
        text = f"{self.answers} answers a step, {self.at_once} at once: a cache of up to {in_bytes(self.cache_bytes)}"
        text += "" if self.fits else f", {in_bytes(self.total_bytes)} in all; fewer are drawn at once if it is short"
        if self.least_s is None:
            return text
        return f"{text}; at least {in_short_time(self.least_s)} where each has {self.max_tokens} tokens"


def samples_of(config: Config) -> int:
    """Return how many answers to each prompt a step draws; 0 for a run that learns from its data."""
    return config.rollouts.samples if config.train.objective in (*POLICY_OBJECTIVES, ON_POLICY) else 0


def sampling_cost(config: Config, plan: MemoryPlan, prompts: int, limits: MachineLimits | None) -> SamplingCost | None:
    """Return what a step with so many prompts draws; None if it draws nothing, or for a model without a formula."""
    decoder, ask, rollouts = plan.decoder, plan.ask, config.rollouts
    if not samples_of(config) or not isinstance(decoder, Decoder):
        return None
    longest = ask.max_length + rollouts.max_tokens
    answers = prompts * rollouts.samples
    at_once = max(1, min(MOST_ROWS, answers, MOST_TOKENS // longest))
    cached = 0
    if rollouts.environment and rollouts.turns > 1:  # of those that wait, and of those that have their next answer
        cached = min(MOST_TOKENS, answers * ask.max_length) * (1 if answers == at_once else 2)
    cache = (at_once * longest + cached) * cache_bytes(decoder, ask.dtype)
    beside = sum(part.bytes for part in plan.estimate.parts if part.name != "activations")
    seconds = None
    if limits is not None and (flops := limits.product_flops.get(ask.dtype)):
        read_s = plan.estimate["weights"] / (limits.bytes_per_s * limits.memory_share)
        computed_s = 2 * decoder.active_parameters * at_once / (flops * limits.product_share)
        seconds = math.ceil(answers / at_once) * rollouts.max_tokens * max(read_s, computed_s)
    return SamplingCost(
        answers, at_once, rollouts.max_tokens, cache, beside + cache, plan.budget.bytes, seconds
    )  # fmt: skip
