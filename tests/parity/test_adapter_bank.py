"""Rows of several adapters on bases that store their weights in their own ways, and what follows one after another."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.engine.adapter_bank import NO_ADAPTER, AdapterBank, bank_batches, check_base_alone, why_not_bankable
from dualtune.engine.backend import LoadRequest
from dualtune.engine.decoding import CannotBatch
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import random_adapter
from dualtune.model.adapter import AdapterSpec
from dualtune.model.beside import BesideAdapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.fingerprints import plain_batch
from dualtune.train.generation.batched import check_decoding

for _library in ("torch", "transformers", "mlx.core"):
    pytest.importorskip(_library)
import tiny_families  # noqa: E402

SPEC = AdapterSpec(4, 6.0, 0.0, ("all-linear",))
MODULE = "model.layers.0.self_attn.q_proj"


def state_of(module=MODULE, rank=4, size=1.0):
    A, B = np.full((rank, 8), size, np.float32), np.full((6, rank), size, np.float32)
    return {f"base_model.model.{module}.lora_{part}.weight": x for part, x in (("A", A), ("B", B))}


@pytest.mark.parametrize(
    ("kind", "family", "quantization"),
    [("torch", "gpt2", "nf4"), ("mlx", "gpt2", "affine4"), ("torch", "mixtral", "none"), ("mlx", "mixtral", "none")],
)
def test_rows_compute_what_each_adapter_computes_alone(kind, family, quantization, open_backend, tmp_path):
    """Packed weights, matrices that lie the other way round, and attention beside experts."""
    path = tiny_families.write_family(family, tmp_path / family)
    request = LoadRequest(path, "float32", quantization, "pretrained", SPEC, OptimizerSpec(), seed=0)
    engine = open_backend(kind).load(request)
    states = [random_adapter(engine.adapter_state(), seed) for seed in (1, 2)]
    bank = AdapterBank([(replace(SPEC, alpha=alpha), state) for alpha, state in zip((6.0, 3.0), states, strict=True)])
    texts = [np.arange(3, 3 + n, dtype=np.int32) % tiny_families.VOCAB for n in (7, 3, 5)]
    check_decoding(engine, texts, bank)
    logits_BV = engine.decoding(bank).enter(texts, adapters=(0, 1, NO_ADAPTER)).rows().astype(np.float64)
    halved = {name: x * np.float32(0.5 if "lora_B" in name else 1) for name, x in states[1].items()}
    for text, logits_V, state in zip(texts, logits_BV, (states[0], halved, engine.neutral_state()), strict=True):
        engine.load_adapter_state(state)
        alone_V = engine.logprobs(plain_batch(text))[0, -1]
        assert np.abs(logits_V - np.logaddexp.reduce(logits_V) - alone_V).max() <= tolerances.LOGPROBS


@pytest.mark.parametrize(
    ("spec", "state"),
    [
        (replace(SPEC, method="dora"), state_of()),
        (replace(SPEC, merge_for="nf4"), state_of()),
        (SPEC, state_of() | {"base_model.model.model.norm.weight": np.ones(8, np.float32)}),
        (SPEC, state_of("model.layers.0.mlp.experts.1.gate_proj")),
        (SPEC, state_of("model.layers.0.mlp.gate")),
        (SPEC, state_of(size=np.nan)),
        (replace(SPEC, alpha=400.0), state_of(size=1e3)),
    ],
    ids=["dora", "merge_for", "beside", "expert", "router", "not a number", "beyond float16"],
)  # fmt: skip
def test_what_is_more_than_a_product_of_each_row_is_in_no_bank(spec, state):
    assert why_not_bankable(SPEC, state_of()) is None
    assert (why := why_not_bankable(spec, state)) and "base_model" not in why  # PEFT's names are not the user's
    assert bank_batches([None, (spec, state), (SPEC, state_of())], 1000) == [([2, 0], True), ([1], False)]


def test_banks_are_as_large_as_memory_and_ranks_allow():
    few, many = (SPEC, state_of()), (SPEC, state_of(rank=600))
    assert bank_batches([few] * 3, 2 * 14 * 4) == [([0, 1], True), ([2], True)]
    assert bank_batches([few, many, many, None], 10**9) == [([0, 1, 3], True), ([2], True)]
    assert bank_batches([None], 10**9) == [([0], False)]
    assert bank_batches([few], 0) == [([0], True)]


@pytest.mark.parametrize(
    ("spec", "adapted", "moves"),
    [
        (replace(SPEC, beside=BesideAdapter(modules=("norm",))), [MODULE], False),
        (SPEC, [MODULE], True),
        (SPEC, [MODULE, "model.layers.0.mlp.experts.*.gate_proj"], False),
    ],
    ids=["trains the base", "moves weights", "adapts experts"],
)
def test_an_engine_that_cannot_leave_its_own_out_says_so(spec, adapted, moves):
    check_base_alone(SPEC, [MODULE])
    with pytest.raises(CannotBatch):
        check_base_alone(spec, adapted, moves_weights=moves)


def test_adapters_of_another_model_do_not_fit():
    bank = AdapterBank([(SPEC, state_of())])
    bank.check_fits({MODULE: (6, 8)})
    for shapes in ({}, {MODULE: (8, 6)}):
        with pytest.raises(CannotBatch, match="not a linear layer of this model"):
            bank.check_fits(shapes)
