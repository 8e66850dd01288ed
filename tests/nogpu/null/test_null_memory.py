"""Memory that runs out, and two cards. The allocator is torch's; only the size of the card is pretended."""

import gc

import numpy as np
import pytest

null_gpu = pytest.importorskip("null_gpu", reason="needs the null GPU: make test-null-gpu")

import torch  # noqa: E402
from null_engines import batch, load, shape, step  # noqa: E402

from dualtune.data.batches import SequenceLayout, micro_batches  # noqa: E402
from dualtune.data.documents import in_memory  # noqa: E402
from dualtune.engine import nvidia  # noqa: E402
from dualtune.train.recovery import Recovery  # noqa: E402
from dualtune_torch.backend import TorchBackend  # noqa: E402

DOCUMENT = 512  # tokens
WHOLE = 81559 << 20


@pytest.fixture
def small_card():
    """Leave no more memory than is in use, plus the given bytes."""
    yield lambda room: null_gpu.set_memory(null_gpu.used_memory() + room)
    null_gpu.set_memory(WHOLE)


def test_a_step_that_does_not_fit_is_repeated_smaller(small_card):
    engine, backend = load(shape(layers=2)), TorchBackend("cuda")
    documents = in_memory([(np.arange(DOCUMENT, dtype=np.int32) % 90, np.ones(DOCUMENT, bool))] * 16)
    recovery = Recovery(backend, engine, SequenceLayout(16 * DOCUMENT, DOCUMENT), DOCUMENT)
    _attempt(recovery, engine, documents)  # compiles
    engine.discard()
    torch.cuda.reset_peak_memory_stats()
    _attempt(recovery, engine, documents)
    needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    engine.discard()
    small_card(needed // 2)
    with null_gpu.counted() as counts:
        assert not _attempt(recovery, engine, documents)
    assert counts.total("out of memory") > 0
    assert recovery.layout.max_tokens < 16 * DOCUMENT
    while not _attempt(recovery, engine, documents):
        assert recovery.layout.max_tokens >= DOCUMENT
    engine.optim_step(lr=1e-4, max_grad_norm=0.3)


def test_a_model_that_does_not_fit_is_said_so(small_card):
    gc.collect()
    torch.cuda.empty_cache()
    small_card(50 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        load(shape(layers=2))
    assert TorchBackend("cuda").is_out_of_memory(caught.value)


def test_a_limit_below_the_card_is_enforced():
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (50 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        load(shape(layers=2), memory_limit_bytes=limit)
    load(shape(layers=1))  # lifts the limit


def test_everything_is_on_the_second_card():
    before = null_gpu.used_memory(0)
    try:
        engine = load(shape(layers=1), device="cuda:1")
        step(engine, batch(512))
        with null_gpu.counted() as counts:
            step(engine, batch(512))
        assert torch.cuda.current_device() == 1
        assert {str(tensor.device) for tensor in engine.model.parameters()} == {"cuda:1"}
        assert null_gpu.used_memory(0) == before
        assert null_gpu.used_memory(1) > 50e6
        assert counts["wait"] == counts["not implemented"] == {}
        assert "between devices" not in counts["copy"]
        assert [device.total_bytes >> 20 for device in TorchBackend("cuda:1").devices()] == [24564, 81559]
    finally:
        torch.cuda.set_device(0)


def test_a_lost_card_does_not_hide_the_other(monkeypatch):
    assert [gpu.compute_capability for gpu in nvidia.query(None).visible] == ["9.0", "8.6"]
    monkeypatch.setenv("NULL_GPU_LOST", "0")
    assert [gpu.compute_capability for gpu in nvidia.query(None).visible] == ["8.6"]


def _attempt(recovery, engine, documents):
    batches = micro_batches(documents, range(len(documents)), recovery.layout, seed=0, step=0)
    return recovery.attempt(0, list(batches), lambda each: engine.forward_backward(each, divisor=7.0))
