"""Fingerprints of an adapter in batches: the same tokens as of each text alone."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from dualtune.engine.testing.conformance import random_adapter
from dualtune.train.fingerprints import MOST_TOKENS, PROMPTS, fingerprints, gap, logprobs_of, plain_batch, recompute
from dualtune.train.generation.inference import BASE_ONLY, load_model


@pytest.fixture(params=["numpy", "torch", "mlx"])
def model(request, open_backend):
    path = request.getfixturevalue("tiny_softmax" if request.param == "numpy" else "tiny_llama")
    modules = ("mixer", "head") if request.param == "numpy" else ("all-linear",)
    return load_model(open_backend(request.param), str(path), spec=replace(BASE_ONLY, rank=4, targets=modules))


def test_fingerprints_take_a_pass_per_batch_and_those_recorded_alone_are_verified(model, monkeypatch):
    engine, tokenizer = model.engine, model.tokenizer
    engine.load_adapter_state(random_adapter(engine.adapter_state(), 1))
    texts = [tokenizer.encode(prompt, special=True) for prompt in PROMPTS]
    alone = [engine.logprobs(plain_batch(ids))[0, -8:] for ids in texts]
    batches, logprobs = [], engine.logprobs
    monkeypatch.setattr(type(engine), "logprobs", lambda _, batch: batches.append(batch.tokens_BT) or logprobs(batch))
    found = fingerprints(engine, tokenizer)
    assert sum(map(len, batches)) == len(PROMPTS) > len(batches)
    assert all(tokens_BT.size <= MOST_TOKENS for tokens_BT in batches)
    recorded = []
    for entry, ids, logprobs_PV in zip(found, texts, alone, strict=True):
        tops = [[(i, float(logprobs_V[i])) for i in np.argsort(-logprobs_V)[:5]] for logprobs_V in logprobs_PV]
        assert entry["tokens"] == ids.tolist() and len(tops) == 8
        for top, expected in zip([*entry["earlier"], entry["top"]], tops, strict=True):
            assert [i for i, _ in top] == [i for i, _ in expected]
            assert [p for _, p in top] == pytest.approx([p for _, p in expected], abs=1e-5)
        recorded.append({"tokens": entry["tokens"], "top": tops[-1], "earlier": tops[:-1]})
    difference = gap(recorded, recompute(engine, recorded))
    assert (difference.num_positions, difference.top1) == (40, 1.0)
    assert difference.logprob < 1e-5 and difference.kl < 1e-8


@pytest.mark.parametrize(("dtype", "winner"), [("float32", 3), ("bfloat16", 4)])
def test_a_tie_in_a_batch_is_decided_by_the_text_alone(dtype, winner):
    """Where rounding makes another token the most probable one. In 16 bits ties are everywhere, and limits are wide."""

    class Rounding:
        description = SimpleNamespace(dtype=dtype)
        shapes: ClassVar = []

        def logprobs(self, batch):
            self.shapes.append(batch.tokens_BT.shape)
            table = np.tile(-np.arange(9, dtype=np.float32), (*batch.tokens_BT.shape, 1))
            table[..., [3, 4]] = (1.0, 1.0 - 2e-5) if len(batch.tokens_BT) == 1 else (1.0, 1.0 + 2e-5)
            return table

    found = logprobs_of(Rounding(), [[7], [1, 2, 3], [5, 6]], [2, 2, 2])
    assert [each.shape for each in found] == [(1, 9), (2, 9), (2, 9)]
    assert {int(i) for each in found for i in each.argmax(-1)} == {winner}
    assert Rounding.shapes == [(3, 3), *([(1, 3), (1, 2), (1, 1)] if dtype == "float32" else [])]


def test_long_texts_are_computed_alone(model):
    """Records are not trusted: many long ones must not become one batch."""
    texts = [[5] * MOST_TOKENS, [6] * 90, [7] * 4]
    sizes = []
    wide = SimpleNamespace(
        description=model.engine.description,
        logprobs=lambda batch: sizes.append(batch.tokens_BT.size) or model.engine.logprobs(batch),
    )
    assert [len(each) for each in logprobs_of(wide, texts, [3, 90, 9])] == [3, 90, 4]
    assert max(sizes) <= MOST_TOKENS
