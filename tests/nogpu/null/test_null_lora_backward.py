"""`lora_backward` on the null GPU: what it asks of the allocator, and that a graph records it. Numbers are a GPU's."""

import pytest

null_gpu = pytest.importorskip("null_gpu", reason="needs the null GPU: make test-null-gpu")

import torch  # noqa: E402

from dualtune.engine.kernels import lora_backward  # noqa: E402

SHAPES = ((512, 768), (512, 768), (16, 768), (768, 16))  # grad_out, x, lora_down, lora_up
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=["torch", "triton"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("DUALTUNE_KERNELS", request.param)


def work(dtype):
    given = [torch.zeros(shape, device="cuda", dtype=dtype) for shape in SHAPES]
    return lambda: lora_backward(*given, 2.0, need_grad_x=True, require_gpu=True)


def counters():
    found = torch.cuda.memory_stats()
    return {name: found[name] for name in found if name.endswith(".current") or name == "num_alloc_retries"}


def peak_of(work, calls):
    torch.cuda.reset_peak_memory_stats()
    for _ in range(calls):
        work()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thousand_calls_leave_the_allocator_as_it_was(kernels, dtype):
    """With the memory of one, and without one wait or one new allocation of the driver's."""
    call = work(dtype)
    peak_of(call, 3)
    before, once = counters(), peak_of(call, 1)
    with null_gpu.counted() as counts:
        assert peak_of(call, 1000) == once
    assert counters() == before
    assert counts["wait"] == counts["not implemented"] == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_recorded_as_one_graph(kernels, dtype):
    call = work(dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with null_gpu.counted() as counts, torch.cuda.graph(graph):
        call()
    assert counts.total("recorded launch") + counts.total("recorded product") >= 5  # the products of the formula
    assert counts["beside a recording"] == counts["forbidden while recording"] == {}
    with null_gpu.counted() as counts:
        graph.replay()
    assert counts["graph"] == {"": 1} and counts.total("launch") + counts.total("product") == 0
