"""What MLX may hold on Metal, set on the CPU's allocator, which has the same functions."""

import importlib
from dataclasses import replace

import pytest

from dualtune.engine.backend import LoadRequest
from dualtune.engine.machine import Budget
from dualtune.engine.memory.estimate import Ask
from dualtune.engine.memory.plan import make_plan
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.memory import RunMemory

mx = pytest.importorskip("mlx.core")
limits = importlib.import_module("dualtune_mlx.runtime")
backend = importlib.import_module("dualtune_mlx.backend")
RESERVE = importlib.import_module("dualtune_mlx.card.memory").METAL_RESERVE
MB, GB = 10**6, 10**9


def limits_now():
    memory, cached = mx.set_memory_limit(0), mx.set_cache_limit(0)
    mx.set_memory_limit(memory), mx.set_cache_limit(cached)
    return memory, cached


@pytest.fixture
def at_first():
    limits.limit_memory(None, None, on_metal=False)
    yield limits_now()
    limits.limit_memory(None, None, on_metal=False)


def test_on_metal_the_cache_has_the_plan_s_size_and_the_limit_holds_for_both(at_first):
    limits.limit_memory(8 * GB, 20 * MB, on_metal=True)
    assert limits_now() == (8 * GB - RESERVE, 20 * MB)


def test_no_limit_of_an_earlier_engine_stays(at_first):
    limits.limit_memory(8 * GB, 20 * MB, on_metal=True)
    limits.limit_memory(None, None, on_metal=True)
    assert limits_now() == at_first


def test_a_cache_never_grows_beyond_mlx_s_own_limit(at_first):
    limits.limit_memory(None, 10**15, on_metal=True)
    assert limits_now() == at_first


def test_on_a_cpu_the_cache_stays_as_it_is(at_first):
    limits.limit_memory(2 * GB, 20 * MB, on_metal=False)
    assert limits_now() == (2 * GB, at_first[1])


def test_an_engine_keeps_no_more_than_it_was_told(at_first, tmp_path, monkeypatch, open_backend):
    """Real steps: MLX's counter of cached buffers stays below the figure, and goes above it without one."""
    monkeypatch.setattr(backend, "chip", lambda: "Apple M4")
    spec, path = AdapterSpec(4, 8.0, 0.1, ("all-linear",)), write_tiny_llama(tmp_path / "model")
    request = LoadRequest(path, "float32", "none", "pretrained", spec, OptimizerSpec(), seed=1)

    def most_cached(request):
        mx.clear_cache()
        engine, most = open_backend("mlx").load(request), 0
        for lengths in ([9, 16], [40, 31], [5, 64]):
            engine.forward_backward(random_batch(lengths, 96), divisor=7.0)
            engine.optim_step(lr=1e-3, max_grad_norm=1.0)
            mx.synchronize()
            most = max(most, mx.get_cache_memory())
        return most

    free = most_cached(request)
    assert most_cached(replace(request, reused_bytes=free // 4)) <= free // 4
    assert free > 100_000


def test_a_run_s_plan_says_how_much():
    """All of the peak that is not there all the time: with what always is, and the reserve, it fills the plan."""
    decoder = decoder_of(KNOWN["HuggingFaceTB/SmolLM2-135M"])
    ask = Ask(
        backend="mlx", device="metal", quantization="none", dtype="bfloat16", rank=16, targets="all-linear",
        micro_batch_tokens=2048, max_length=2048,
    )  # fmt: skip
    plan = make_plan(decoder, ask, Budget(16 * GB, ""), auto=True)
    found = RunMemory(plan.ask.checkpointing, Budget(16 * GB, ""), plan).reused_bytes
    always = sum(plan.estimate[name] for name in ("weights", "adapter", "optimizer", "reserve"))
    assert found is not None and found > GB and found + always == plan.estimate.total_bytes
    assert RunMemory(plan.ask.checkpointing, Budget(16 * GB, "")).reused_bytes is None
