"""adapter.master_weights: bfloat16: weights without float32 masters, whose updates are rounded at random."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.engine.backend import LoadRequest
from dualtune.engine.memory.estimate import Ask, estimate
from dualtune.engine.memory.shapes import decoder_of
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.config_file import read_config
from dualtune.model.optimizer import Averaging, OptimizerSpec
from dualtune.model.stochastic_rounding import rounded, update_parts
from dualtune.train import prepare

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

from dualtune_mlx.optimizer import FlatLayout  # noqa: E402
from dualtune_mlx.optimizer import flat_optimizer as mlx_optimizer  # noqa: E402
from dualtune_torch.optimizer import flat_optimizer as torch_optimizer  # noqa: E402

SEED = 11
SHAPES = {"layers.1.w": (40, 50), "embed_tokens.weight": (70, 9), "layers.0.w": (3000,)}
SIZE = 2000 + 630 + 3000
STEP = np.array([3], np.int32)


def in_bfloat16(values):
    return torch.from_numpy(np.array(values, np.float32)).bfloat16().float().numpy()


def test_rounding_is_the_same_everywhere_and_leaves_what_is_exact():
    w = np.random.default_rng(0).normal(0, 1, 5000).astype(np.float32)
    elements = np.arange(5000, dtype=np.int32) + np.int32(2**31 - 6000)
    expected = rounded(w, elements, STEP, SEED, np)
    assert np.array_equal(expected, in_bfloat16(expected)) and np.abs(expected / w - 1).max() < 2**-7
    theirs = rounded(*map(torch.from_numpy, (w, elements, STEP)), SEED, torch).numpy()
    assert np.array_equal(theirs, expected)
    assert np.array_equal(np.array(rounded(*map(mx.array, (w, elements, STEP)), SEED, mx)), expected)
    assert np.array_equal(rounded(expected, elements, STEP, SEED, np), expected)
    for other in (rounded(w, elements, STEP + 1, SEED, np), rounded(w, elements, STEP, SEED + 1, np)):
        assert 0.2 < np.mean(other != expected) < 0.5


@pytest.mark.parametrize("over", ["elements", "steps"])
def test_rounding_is_right_on_average(over):
    """Of 40,000 draws the mean is within four deviations, and one says nothing of the next one."""
    n, share = 40_000, 0.3
    w, numbers = np.full(n, 1 + share / 128, np.float32), np.arange(n, dtype=np.int32)
    if over == "elements":
        result = rounded(w, numbers, STEP, SEED, np)
    else:
        result = rounded(w, np.full(n, 7, np.int32), numbers, SEED, np)
    up = (result > 1).astype(float)
    deviation = np.sqrt(share * (1 - share) / n)
    assert set(result.tolist()) == {1.0, 1 + 1 / 128}
    assert abs(up.mean() - share) < 4 * deviation
    assert abs(np.mean((up[1:] - share) * (up[:-1] - share)) / (share * (1 - share))) < 4 / np.sqrt(n)


def updated(name, weights, grads, spec, lr, steps):
    """Return bfloat16 weights after some updates by the same gradient, and the slots."""
    if name == "torch":
        flat = torch.from_numpy(weights).bfloat16().requires_grad_()
        flat.grad_dtype, flat.grad = torch.float32, torch.zeros(len(weights))
        optimizer = torch_optimizer(flat, SHAPES, spec, SEED)
        for _ in range(steps):
            flat.grad.copy_(torch.from_numpy(grads))
            optimizer.step(lr, torch.tensor(True))
        return flat.detach().float().numpy(), {slot: optimizer.read(slot).numpy() for slot in spec.slots}
    optimizer = mlx_optimizer(spec, FlatLayout(SHAPES), rounding_seed=SEED)
    params, slots = mx.array(weights).astype(mx.bfloat16), optimizer.zero_slots()
    rates = lr * optimizer.lr_factors
    shrink = mx.array(1 - rates * spec.settings["weight_decay"], mx.float32)
    rates = mx.array(rates, mx.float32)
    for step in range(1, steps + 1):
        numbers = {"step": mx.array(float(step)), "lr": rates, "shrink": shrink}
        params, slots = optimizer.update(params, slots, mx.array(grads), **numbers, is_good=mx.array(True))
    return np.array(params.astype(mx.float32)), {n: np.array(v) for n, v in optimizer.read(slots).items()}


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_updates_far_below_the_last_bit_are_not_lost(backend):
    """One step moves a weight of 1 by a fortieth of the distance to its neighbour: rounding to nearest loses it."""
    weights, grads = np.ones(SIZE, np.float32), np.ones(SIZE, np.float32)
    lr, steps = 2**-8 / 40, 60
    assert np.array_equal(in_bfloat16(weights - lr * grads), weights)
    result, _ = updated(backend, weights, grads, OptimizerSpec("sgd"), lr, steps)
    moved, expected = 1 - result, steps * lr
    assert abs(moved.mean() - expected) < 4 * moved.std() / np.sqrt(SIZE)
    parts = np.split(moved, [2000, 2630])  # each tensor, cut or not
    assert all(abs(part.mean() - expected) < 5 * moved.std() / np.sqrt(len(part)) for part in parts)


@pytest.mark.parametrize("name", ["adamw", "lion", "adamw_8bit", "adafactor"])
def test_each_optimizer_is_its_own_on_float32_rounded_after_each_step(name, monkeypatch):
    """Both backends, cut into several parts, with another rate for the embedding; the slots are those of float32."""
    for module in ("dualtune_torch.optimizer", "dualtune_torch.kernels.eight_bit"):
        monkeypatch.setattr(f"{module}.UPDATE_CHUNK", {"cpu": 1024})
    monkeypatch.setattr("dualtune_mlx.optimizer.UPDATE_CHUNK", 1024)
    rng, spec = np.random.default_rng(1), OptimizerSpec(name, lr_factors={"embed_tokens.weight": 4.0})
    weights, grads = in_bfloat16(rng.normal(0, 1, SIZE)), rng.normal(0, 1, SIZE).astype(np.float32)
    for backend in ("torch", "mlx"):
        result, slots = updated(backend, weights, grads, spec, 1e-3, 3)
        w, own, start = weights.copy(), {}, 0
        for tensor, shape in SHAPES.items():
            first = {"embed_tokens.weight": 0, "layers.0.w": 630, "layers.1.w": 3630}[tensor]
            stop = start + int(np.prod(shape))
            part, state = w[start:stop].reshape(shape), None
            for step in (1, 2, 3):
                state = state or {s: np.zeros(i, np.float32) for s, i in spec.entry.slots_of(tensor, shape).items()}
                g = grads[start:stop].reshape(shape)
                part, state = spec.update(part, g, state, step=step, lr=1e-3 * spec.lr_factor(tensor))
                numbers = np.arange(first, first + part.size, dtype=np.int32)
                part = rounded(part.astype(np.float32).flatten(), numbers, np.array([step], np.int32), SEED, np)
                part = part.reshape(shape)
            w[start:stop] = part.flatten()
            own |= {(slot, tensor): values for slot, values in state.items()}
            start = stop
        # An update that differs in its last bit is rounded the other way now and then.
        assert np.mean(result != w) < 0.002 and np.abs(result / w - 1).max() < 2**-6
        for slot in spec.slots:
            expected = np.concatenate([own[slot, t].flatten() for t in SHAPES if (slot, t) in own] or [np.zeros(0)])
            assert np.allclose(slots[slot].flatten(), expected, rtol=2e-2, atol=1e-6)


def test_parts_cover_each_tensor_once():
    spec = OptimizerSpec("adamw", lr_factors={"embed_tokens.weight": 4.0})
    parts = update_parts(spec, SHAPES, 1024)
    assert [sum(size for _, size in part.pieces) for part in parts] == [1024, 976, 630, 1024, 1024, 952]
    assert [part.run.lr_factor for part in parts] == [1, 1, 4, 1, 1, 1]
    assert [part.pieces[0][0] for part in parts] == [3630, 4654, 0, 630, 1654, 2678]
    whole = update_parts(OptimizerSpec("adafactor"), SHAPES, 1024)
    assert [part.run.shapes for part in whole] == [{name: shape} for name, shape in SHAPES.items()]


# --- engines ----------------------------------------------------------------------------------------------------------

FULL = AdapterSpec(rank=1, alpha=1.0, dropout=0.0, targets=(), method="full", master_weights="bfloat16")


@pytest.fixture
def load(backends, tmp_path_factory):
    directory = write_tiny_llama(tmp_path_factory.mktemp("model"))

    def load_(name, dtype="bfloat16", optimizer="adamw", average=None):
        spec = OptimizerSpec(optimizer, average=average)
        return backends[name].load(LoadRequest(directory, dtype, "none", "pretrained", FULL, spec, seed=SEED))

    return load_


def train(engine, steps):
    for seed in steps:
        batch = random_batch([9, 7], 96, seed=seed)
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-4, max_grad_norm=1.0)
    return engine


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("average", [None, Averaging()])
def test_a_run_is_resumed_to_the_bit(load, backend, average):
    expected = train(load(backend, average=average), range(4))
    first, second = train(load(backend, average=average), range(2)), load(backend, average=average)
    second.load_adapter_state(first.adapter_state())
    second.load_optimizer_state(first.optimizer_state())
    state, actual = expected.adapter_state(), train(second, range(2, 4)).adapter_state()
    assert all(np.array_equal(actual[name], values) for name, values in state.items())
    assert all(np.array_equal(values, in_bfloat16(values)) for values in state.values())
    start = load(backend).adapter_state()
    assert all((values != start[name]).any() for name, values in state.items())
    ours, theirs = expected.optimizer_state(), second.optimizer_state()
    for slot, values in ours.slots.items():
        assert all(np.array_equal(theirs.slots[slot][name], tensor) for name, tensor in values.items())


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_compute_dtype_is_that_of_the_weights(load, backend):
    with pytest.raises(ConfigError, match=r"adapter\.master_weights: got bfloat16, but the model computes in float32"):
        load(backend, dtype="float32")


@pytest.mark.parametrize(
    "lines",
    [
        "adapter: {master_weights: bfloat16}",
        "adapter: {master_weights: bfloat16, method: full}\nmodel: {name: m, dtype: float16}",
        "adapter: {master_weights: bfloat16, method: full}\nhybrid: {enabled: true}",
    ],
)
def test_what_does_not_go_together(lines):
    model = "" if "model:" in lines else "model: {name: m}\n"
    with pytest.raises(ConfigError, match=r"adapter\.master_weights: got bfloat16"):
        parse_config(f"{model}data: {{train: d.jsonl}}\n{lines}\n")


def test_a_config_says_it():
    config = parse_config(
        "model: {name: m}\ndata: {train: d.jsonl}\nadapter: {master_weights: bfloat16, method: full}\n"
    )
    assert prepare._spec(config, None) == FULL


@pytest.mark.parametrize(("backend", "device"), [("torch", "cuda"), ("mlx", "metal")])
def test_the_plan_counts_two_bytes_a_weight(tiny, backend, device):
    decoder = decoder_of(read_config(tiny.model_dir))
    ask = Ask(backend, device, "none", "bfloat16", 1, (), micro_batch_tokens=64, max_length=64, method="full")
    masters = estimate(decoder, ask)
    without = estimate(decoder, replace(ask, master_weights="bfloat16"))
    n = decoder.num_parameters
    assert masters["weights"] == 6 * n and without["weights"] == 2 * n
    assert without["optimizer"] == masters["optimizer"] == (4 + 8) * n
