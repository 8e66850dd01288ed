"""Schedule-free AdamW against the paper's algorithm with its three sequences, and the shares of averages."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.engine.memory.estimate import Ask
from dualtune.engine.memory.estimate import optimizer as memory_of
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.model.optimizer import OPTIMIZERS, Averaging, OptimizerSpec, averaging, slot_shapes
from dualtune.model.update_rules import newest_share


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_schedule_free_is_the_paper_s_algorithm(warmup):
    """Defazio et al., arXiv 2405.15682, algorithm 1, written down with x, y and z, in float64."""
    rng = np.random.default_rng(0)
    peak, beta1, beta2, eps, decay = 0.03, 0.9, 0.999, 1e-8, 0.1
    spec = OptimizerSpec("schedule_free", {"weight_decay": decay, "warmup_steps": warmup})
    start = rng.normal(size=(4, 5))
    w, slots = start.copy(), {"d": np.zeros((4, 5)), "v": np.zeros((4, 5))}
    x, z, v, sum_of_squares = start.copy(), start.copy(), np.zeros((4, 5)), 0.0
    for step in range(1, 13):
        y = (1 - beta1) * z + beta1 * x
        np.testing.assert_allclose(w, y, rtol=0, atol=1e-14)
        g, rate = rng.normal(size=(4, 5)) + y, peak * min(1, step / (warmup + 1))
        v = beta2 * v + (1 - beta2) * g**2
        z = z - rate * (g / (np.sqrt(v / (1 - beta2**step)) + eps) + decay * y)
        sum_of_squares += rate**2
        c = rate**2 / sum_of_squares
        x = (1 - c) * x + c * z
        w, slots = spec.update(w, g, slots, step=step, lr=rate)
        np.testing.assert_allclose(spec.result(w, slots), x, rtol=0, atol=1e-14)
        np.testing.assert_allclose(slots["d"], z - w, rtol=0, atol=1e-14)
    assert np.abs(x - w).max() > 1e-4, "the result is w, so nothing is shown"


@pytest.mark.parametrize("warmup", [0, 1, 7, 1000])
def test_the_share_of_the_newest_is_its_part_of_the_sum(warmup):
    weights = [min(1, i / (warmup + 1)) ** 2 for i in range(1, 2000)]
    sums = np.cumsum(weights)
    for step in (1, 2, 3, 7, 8, 9, 999, 1000, 1001, 1999):
        assert newest_share(step, warmup) == pytest.approx(weights[step - 1] / sums[step - 1], rel=1e-12)


@pytest.mark.parametrize("warmup", [0.0, 1.0, 7.0, 1000.0])
def test_the_backends_have_the_same_share(warmup):
    torch, mx = pytest.importorskip("torch"), pytest.importorskip("mlx.core")
    from dualtune_mlx.optimizer import newest_share as of_mlx
    from dualtune_torch.optimizer import newest_share as of_torch

    for step in (1, 2, 7, 8, 1000, 1001, 100_000):
        expected = newest_share(step, warmup)
        ours = of_torch(torch.tensor(float(step), dtype=torch.float64), {"warmup_steps": warmup}).item()
        assert ours == pytest.approx(expected, rel=1e-12)
        assert of_mlx(mx.array(float(step)), warmup).item() == pytest.approx(expected, rel=1e-6)


def test_the_shares_of_an_average():
    tail, ema = averaging("tail", 4, 10), averaging("ema", 4, 10)
    assert (tail, ema, averaging("none", 4, 10)) == (Averaging(start=6), Averaging(least=0.25), None)
    assert [tail.share(step) for step in (1, 6, 7, 8, 10)] == [1, 1, 1, 1 / 2, 1 / 4]
    assert [ema.share(step) for step in (1, 2, 4, 5, 99)] == [1, 1 / 2, 1 / 4, 1 / 4, 1 / 4]


@pytest.mark.parametrize(("average", "num_bytes"), [(None, 0), (Averaging(), 4)])
def test_an_average_is_a_slot_on_top_of_any_optimizer(average, num_bytes):
    for name, entry in OPTIMIZERS.items():
        spec = OptimizerSpec(name, average=average)
        assert spec.slots == entry.slots + ("offset",) * (average is not None)
        shapes = {"w": (3, 5)}
        own, whole = slot_shapes(entry, shapes, averages=False), spec.slot_shapes(shapes)
        assert whole == (own | {"offset": shapes} if num_bytes else own)
        assert spec.trains_the_result == (average is None and name != "schedule_free")


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "sgd", "schedule_free"])
def test_the_memory_estimate_counts_the_average_as_a_slot(optimizer):
    decoder = decoder_of(KNOWN["mistralai/Mistral-7B-Instruct-v0.3"])
    plain = Ask("torch", "cpu", "none", "float32", 16, ("q_proj",), 512, 512, optimizer=optimizer)
    n = 32 * 16 * (4096 + 4096)
    assert memory_of(decoder, plain).bytes == pytest.approx(n * (4 + OPTIMIZERS[optimizer].bytes_of("w", (1,))), abs=1)
    averaged = replace(plain, averages=True)
    assert memory_of(decoder, averaged).bytes - memory_of(decoder, plain).bytes == pytest.approx(4 * n, abs=1)
