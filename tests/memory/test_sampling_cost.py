"""What drawing samples takes by formula, against numbers by hand."""

import pytest

from dualtune.config import load_config
from dualtune.config.render import example_path
from dualtune.engine.machine import budget
from dualtune.engine.machines import named, published
from dualtune.engine.memory.plan import plan_of
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.train.generation.sampling_cost import sampling_cost

MACHINE = named("h100-80")


def cost_of(*overrides, limits=True):
    config = load_config(example_path("grpo_math"), ("model.name=Qwen/Qwen3-8B", "model.dtype=bfloat16", *overrides))
    plan = plan_of(config, decoder_of(KNOWN["Qwen/Qwen3-8B"]), "torch", "cuda", budget(MACHINE))
    return plan, sampling_cost(config, plan, 8, published(MACHINE) if limits else None)


def test_the_cache_is_that_of_the_answers_at_once():
    plan, cost = cost_of()
    longest = plan.ask.max_length + 256
    assert (cost.answers, cost.at_once) == (64, min(32, (1 << 14) // longest))
    heads = 2 * plan.decoder.kv_heads * plan.decoder.head_dim
    assert cost.cache_bytes == cost.at_once * longest * plan.decoder.layers * heads * 2
    assert cost.fits and cost.total_bytes == plan.estimate.total_bytes - plan.estimate["activations"] + cost.cache_bytes
    read_s = plan.estimate["weights"] / (published(MACHINE).bytes_per_s * published(MACHINE).memory_share)
    assert cost.least_s == pytest.approx(-(-64 // cost.at_once) * 256 * read_s)
    _, few = cost_of("rollouts.samples=2", "rollouts.max_tokens=16", limits=False)
    assert (few.answers, few.least_s) == (16, None) and few.at_once == min(16, (1 << 14) // (longest - 240))
    _, held = cost_of("rollouts.environment=games.py:Game", "rollouts.turns=2")  # of conversations, between two answers
    per_token = cost.cache_bytes // (cost.at_once * longest)
    assert held.cache_bytes == cost.cache_bytes + per_token * 2 * (1 << 14)
    assert "16 answers a step" in str(few) and "at least" in str(cost) and "at least" not in str(few)


def test_a_run_that_draws_nothing_has_no_such_cost():
    _, cost = cost_of("train.objective=sft", "rollouts.rewards=[]", "rollouts.weights=[]")
    assert cost is None
