"""The real engine on a GPU that computes nothing: what it launches, copies and waits for, and that every verb runs.

Every number that comes from the device is 0, so nothing here says that results are right.
"""

from dataclasses import replace

import numpy as np
import pytest

null_gpu = pytest.importorskip("null_gpu", reason="needs the null GPU: make test-null-gpu")

import torch  # noqa: E402
from null_engines import SMOLLM, batch, load, shape, step  # noqa: E402

from dualtune.engine.testing.tiny_models import write_tiny_llama  # noqa: E402

TINYLLAMA = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
CASES = {
    "plain": (SMOLLM, {}), "reference": (SMOLLM, {"kernels": "reference"}), "float16": (SMOLLM, {"dtype": "float16"}),
    "nf4": (TINYLLAMA, {"quantization": "nf4"}), "affine4": (TINYLLAMA, {"quantization": "affine4"}),
}  # fmt: skip
# The plain path leaves the mask to transformers, which looks whether rows are packed (find_packed_sequence_indices).
WAITS = {"reference": {"cudaStreamSynchronize": 1}}
ONE_COPY = {"pinned to the device": 1}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """The name of a case, and its engine after two steps."""
    model, options = CASES[request.param]
    with null_gpu.counted() as counts:
        engine = load(shape(model, layers=2), **options)
        for _ in range(2):  # the first compiles
            step(engine, batch(512, documents=1))
            engine.evaluate(batch(512, documents=1))
    assert counts["not implemented"] == {}
    return request.param, engine


def test_a_micro_batch_waits_for_nothing_and_is_one_copy(case):
    name, engine = case
    micro_batch = batch(512, documents=1)
    with null_gpu.counted() as counts:
        engine.forward_backward(micro_batch, divisor=7.0)
    assert counts["wait"] == WAITS.get(name, {})
    assert counts["not implemented"] == {}
    assert _from_host(counts) == ONE_COPY
    assert counts.total("launch") > 20
    with null_gpu.counted() as counts:
        engine.evaluate(micro_batch)
    assert counts["wait"] == WAITS.get(name, {})
    assert _from_host(counts) == ONE_COPY


def test_a_micro_batch_of_answers_that_are_compared_waits_once(case):
    """For its log-probabilities, which decide the weights; with weights it waits for nothing and launches no more."""
    name, engine = case
    micro_batch, own = batch(512, documents=1), WAITS.get(name, {})
    weighted = replace(micro_batch, weights_BT=np.full(micro_batch.tokens_BT.shape, -0.5, np.float32))

    def counts_of(work):
        work()  # the first compiles
        with null_gpu.counted() as counts:
            work()
        return counts

    scores = counts_of(lambda: engine.target_logprobs(micro_batch, dropout=True))
    compared = counts_of(lambda: engine.forward_backward(weighted, divisor=1.0))
    plain = counts_of(lambda: engine.forward_backward(micro_batch, divisor=7.0))
    # Copying to the host is one wait, which is counted as the copy and as the call in it.
    waits = {"copy of pageable to the host": 1, "cudaStreamSynchronize": 1 + sum(own.values())}
    assert (scores["wait"], compared["wait"], plain["wait"]) == (waits, own, own)
    assert scores.total("launch") < plain.total("launch") <= compared.total("launch") <= plain.total("launch") + 8


def test_a_step_of_the_optimizer_waits_for_nothing(case):
    _, engine = case
    with null_gpu.counted() as counts:
        engine.optim_step(lr=1e-4, max_grad_norm=0.3)
    assert counts["wait"] == counts["not implemented"] == {}
    assert _from_host(counts) == {}
    assert counts.total("launch") > 0


def test_products_have_the_dtype_of_the_model(case):
    name, engine = case
    with null_gpu.counted() as counts:
        engine.forward_backward(batch(512, documents=1), divisor=7.0)
    dtype = engine.description.dtype
    allowed = {dtype, f"{dtype} to float32"}  # float32: a gradient that is added up
    if name == "reference":
        allowed.add("float32")  # the angles of transformers' rotary embedding
    assert counts.total("product") > 10
    assert set(counts["product"]) <= allowed


@pytest.mark.parametrize("quantization", ["none", "nf4", "affine4"])
def test_every_verb_runs(tmp_path, quantization):
    """From the weights in files to the merged model. bitsandbytes quantizes with its own library for CUDA."""
    model = write_tiny_llama(tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32)
    micro_batch = batch(64, rows=2, documents=2)
    with null_gpu.counted() as counts:
        engine = load_files(model, quantization)
        step(engine, micro_batch)
        assert engine.logprobs(micro_batch).shape == (2, 64, 96)
        assert engine.target_logprobs(micro_batch).shape == (2, 64)
        adapter, optimizer = engine.adapter_state(), engine.optimizer_state()
        engine.load_adapter_state(adapter)
        engine.load_optimizer_state(optimizer)
        words = engine.generate(np.array([1, 2, 3], np.int32), choose=lambda logits: int(logits.argmax()))
        assert [next(words), next(words)] == [0, 0]  # of logits that are all 0
        if quantization == "none":
            engine.save_merged(tmp_path / "merged")
            assert (tmp_path / "merged" / "model.safetensors").stat().st_size > 1e5
        engine.discard()
    assert {tensor.device for tensor in engine.model.parameters()} == {torch.device("cuda:0")}
    assert counts["not implemented"] == {}
    if quantization == "nf4":
        assert any("kQuantizeBlockwise" in name for name in counts["launch"])


def load_files(model, quantization):
    """Load a model from its files."""
    from dualtune.engine.backend import LoadRequest
    from dualtune.model.adapter import AdapterSpec
    from dualtune.model.optimizer import OptimizerSpec
    from dualtune_torch.backend import TorchBackend

    adapter = AdapterSpec(rank=4, alpha=8.0, dropout=0.1, targets=("all-linear",))
    request = LoadRequest(model, "bfloat16", quantization, "pretrained", adapter, OptimizerSpec(), seed=0)
    return TorchBackend("cuda").load(request)


def _from_host(counts):
    return {kind: times for kind, times in counts["copy"].items() if kind.endswith("to the device")}
