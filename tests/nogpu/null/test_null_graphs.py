"""CUDA graphs of the micro-step: they are recorded, and what must not happen meanwhile ends the recording.

The null GPU forbids what CUDA forbids. That a replayed graph computes the same is left to a real one.
"""

import pytest

null_gpu = pytest.importorskip("null_gpu", reason="needs the null GPU: make test-null-gpu")

import torch  # noqa: E402
from null_engines import batch, load, shape, step  # noqa: E402

FORBIDDEN = {
    "read a number": lambda x: x.sum().item(),
    "count": lambda x: x.nonzero(),
    "pageable copy": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


def test_the_third_micro_batch_is_one_graph():
    engine, micro_batch = load(shape(layers=2), kernels="graph"), batch(512)
    step(engine, micro_batch)
    with null_gpu.counted() as counts:
        step(engine, micro_batch)
    recorded = counts.total("recorded launch") + counts.total("recorded product")
    assert recorded > 50
    assert counts["beside a recording"] == counts["forbidden while recording"] == {}
    with null_gpu.counted() as counts:
        engine.forward_backward(batch(512, seed=1), divisor=7.0)
    assert counts["graph"] == {"": 1}
    assert counts.amounts["graph"] >= recorded
    assert counts["wait"] == counts["not implemented"] == {}
    assert sum(times for kind, times in counts["copy"].items() if kind.endswith("to the device")) == 1
    assert counts.total("launch") + counts.total("product") == 0


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_waits_cannot_be_recorded(name):
    x = torch.ones(8, device="cuda")
    FORBIDDEN[name](x)
    recording = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with pytest.raises(RuntimeError, match="captur"), recording:
        FORBIDDEN[name](x + 1)
    x.add_(1)
    torch.cuda.synchronize()  # the device works on


def test_a_number_read_in_the_micro_step_ends_the_recording(monkeypatch):
    engine, micro_batch = load(shape(layers=1), kernels="graph"), batch(512)
    right = engine._target_states

    def wrong(*output_and_inputs):
        hidden_MD = right(*output_and_inputs)
        hidden_MD[0, 0].item()
        return hidden_MD

    monkeypatch.setattr(engine, "_target_states", wrong)
    step(engine, micro_batch)
    with null_gpu.counted() as counts, pytest.raises(RuntimeError, match="captur"):
        step(engine, micro_batch)
    assert "cudaStreamSynchronize" in counts["forbidden while recording"]
