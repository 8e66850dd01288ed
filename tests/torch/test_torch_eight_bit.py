"""AdamW with 8-bit state over one flat tensor: its bytes, the peak of its step, and where its blocks lie."""

from pathlib import Path

import numpy as np
import pytest

from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dualtune_torch.card import memory  # noqa: E402
from dualtune_torch.card.memory import UPDATE_CHUNK  # noqa: E402
from dualtune_torch.kernels import eight_bit  # noqa: E402
from dualtune_torch.optimizer import flat_optimizer  # noqa: E402

SPEC = OptimizerSpec("adamw_8bit", {"weight_decay": 0.1})
YES, NO = torch.tensor(True), torch.tensor(False)


def normal(size, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=size).astype(np.float32))


def flat_of(size, seed=0):
    flat = normal(size, seed).requires_grad_()
    flat.grad = normal(size, seed + 1)
    return flat


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit"])
def test_no_slot_is_ever_there_in_float32(name, monkeypatch):
    """One tensor of sixteen chunks: a byte of state a value and slot, and a step that takes a few chunks beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from memory_storages import peak_of, storages

    size, chunk = 16 * UPDATE_CHUNK["cpu"], 4 * UPDATE_CHUNK["cpu"]
    flat, spec = flat_of(size), OptimizerSpec(name)
    optimizer = flat_optimizer(flat, {"w": (size,)}, spec)
    optimizer.step(0.1, YES)
    held, slots = sum(storages(optimizer.tensors()).values()), len(spec.slots)
    assert held == spec.entry.bytes_of("w", (size,)) == slots * (size + 2 * size // 256)
    peak = peak_of(lambda: optimizer.step(0.1, YES))
    assert peak == pytest.approx(memory.CHUNK_ARRAYS[name] * chunk, rel=0.02) and peak < 2 * size


@pytest.mark.parametrize("sizes", [[512, 256], [300, 512, 7, 256, 256], [1], [5000]], ids=str)
def test_blocks_are_those_of_each_tensor(sizes, monkeypatch):
    monkeypatch.setitem(eight_bit.UPDATE_CHUNK, "cpu", 512)
    flat = flat_of(sum(sizes))
    together = flat_optimizer(flat, {i: (size,) for i, size in enumerate(sizes)}, SPEC)
    parts = [x.detach().clone().requires_grad_() for x in flat.split(sizes)]
    alone = [flat_optimizer(part, {"w": part.shape}, SPEC) for part in parts]
    for step in range(3):
        flat.grad = normal(flat.numel(), seed=10 + step)
        for part, grad, optimizer in zip(parts, flat.grad.split(sizes), alone, strict=True):
            part.grad = grad.clone()
            optimizer.step(0.1, YES)
        together.step(0.1, YES)
    assert torch.equal(flat.detach(), torch.cat([part.detach() for part in parts]))
    for slot in SPEC.entry.slots:
        assert torch.equal(together.read(slot), torch.cat([optimizer.read(slot) for optimizer in alone]))
        assert together.read(slot).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_a_bad_step_changes_nothing_but_the_gradient(bad):
    flat = flat_of(1000)
    optimizer = flat_optimizer(flat, {"w": (1000,)}, SPEC)
    optimizer.step(0.1, YES)
    before = [x.clone() for x in (flat.detach(), optimizer.count, *optimizer.tensors())]
    assert flat.grad is not None and not flat.grad.any()
    flat.grad[3:] = bad
    optimizer.step(0.1, NO)
    assert not flat.grad.any()
    for now, then in zip((flat.detach(), optimizer.count, *optimizer.tensors()), before, strict=True):
        assert torch.equal(now, then)


def test_a_step_is_the_core_s_formula():
    """From a state of many steps, when the count no longer fits in the bits of the dither."""
    flat = flat_of(1000)
    optimizer = flat_optimizer(flat, {"w": (1000,)}, SPEC)
    optimizer.count.fill_(5_000_000)
    before = {"m": normal(1000, 5), "root_v": normal(1000, 6).abs()}
    for slot, values in before.items():
        optimizer.load(slot, lambda flat, values=values: flat.copy_(values))
    slots = {slot: optimizer.read(slot).numpy().astype(np.float64) for slot in before}
    assert flat.grad is not None
    w, g = (x.detach().numpy().astype(np.float64) for x in (flat, flat.grad))
    w, after = SPEC.update(w, g, slots, step=5_000_001, lr=0.1)
    optimizer.step(0.1, YES)
    np.testing.assert_allclose(flat.detach().numpy(), w, rtol=1e-5, atol=1e-6)
    for slot, expected in after.items():
        assert (optimizer.read(slot).numpy() == expected).mean() > 0.995
