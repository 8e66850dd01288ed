"""The prompt of a pair, computed once: the numbers of a step are those of a prompt for each answer."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.engine.backend import CannotShare
from dualtune.engine.testing.numpy_engine import NumpyEngine
from dualtune.train.prepare import prepare
from dualtune.train.start import load_comparison, load_engine
from dualtune.train.step import TrainingStep

PROMPT = "One, two, three, four: what follows"
PAIRS = [{"prompt": f"{PROMPT} {n}?", "chosen": f" {n + 1}!", "rejected": f" {n} or so"} for n in range(6)]
SETTINGS = {
    "train__objective": "dpo", "train__documents_per_step": 4, "train__steps": 2, "data__eval": 0,
    "train__micro_batch_tokens": 512, "adapter__dropout": 0.2, "preference__beta": 1.0
}  # fmt: skip


@pytest.fixture
def pairs(lab, write_rows):
    return replace(lab, data=write_rows(PAIRS, "pairs.jsonl"))


def first_step(lab, *, shares):
    """Loss, gradient, the reference's sums, and the micro-batches of a step from an adapter that is not zero."""
    dtype = {} if lab.backend.name == "numpy" else {"model__dtype": "float32"}
    prepared = prepare(lab.config(**SETTINGS, **dtype), lab.backend)
    engine = load_engine(prepared)
    assert prepared.data.train.shares, prepared.data.train.why_not_shared
    prepared.data.train.shares = shares
    compared = load_comparison(prepared, engine)
    rng = np.random.default_rng(3)
    engine.load_adapter_state(
        {name: rng.normal(0, 0.1, x.shape).astype(np.float32) for name, x in engine.adapter_state().items()}
    )
    step = TrainingStep(prepared, engine, 0, prepared.batches, comparison=compared)
    step.add_gradients()
    return step._loss.value, engine.gradient(), compared.train, step.batches


@pytest.mark.parametrize("lab", ["numpy", "torch", "mlx"], indirect=True)
def test_a_step_with_prompts_once_is_that_with_prompts_twice(pairs):
    """With dropout, and with a gradient through the prompt's keys and values."""
    once, twice = (first_step(pairs, shares=shares) for shares in (True, False))
    assert once[0] == pytest.approx(twice[0], abs=1e-5)
    np.testing.assert_allclose(once[2], twice[2], atol=2e-4)
    for name, gradient in twice[1].items():
        assert np.abs(once[1][name] - gradient).max() <= 1e-4 * max(1e-3, np.abs(gradient).max()), name
    tokens = [sum(batch.num_computed for batch in batches) for *_, batches in (once, twice)]
    assert tokens[0] < 0.6 * tokens[1]
    assert len({sum(batch.num_tokens for batch in batches) for *_, batches in (once, twice)}) == 1


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_an_engine_that_cannot_share_says_so_once(pairs, monkeypatch, weights_of):
    def refused(self, batch, **options):
        if batch.parents_BT is not None:
            raise CannotShare("its layers have a state")
        return original(self, batch, **options)

    original = NumpyEngine.target_logprobs
    monkeypatch.setattr(NumpyEngine, "target_logprobs", refused)
    run_dir = pairs.run("twice", **SETTINGS).run_dir
    notes = [json.loads(line).get("message", "") for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum("its layers have a state" in note for note in notes) == 1


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_an_engine_that_does_not_look_at_parents_is_found_out(pairs, monkeypatch):
    original = NumpyEngine.target_logprobs

    def without_prompt(self, batch, **options):
        found = original(self, batch, **options)
        return found if batch.parents_BT is None else found - 0.5 * (batch.parents_BT > 0) * batch.is_target_BT

    monkeypatch.setattr(NumpyEngine, "target_logprobs", without_prompt)
    prepared = prepare(pairs.config(**SETTINGS), pairs.backend)
    load_engine(prepared)
    assert not prepared.data.train.shares
    assert "computes another loss" in prepared.data.train.why_not_shared
    assert all(batch.parents_BT is None for batch in prepared.batches(0))


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_transformers_own_attention_computes_prompts_twice(pairs):
    prepared = prepare(pairs.config(**SETTINGS, model__kernels="reference"), pairs.backend)
    load_engine(prepared)
    assert not prepared.data.train.shares and "attention" in prepared.data.train.why_not_shared
