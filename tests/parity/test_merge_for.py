"""adapter.merge_for: training sees the merge as a format rounds it, alike on both backends."""

import json
import math
import shutil
import weakref
from dataclasses import replace
from importlib import import_module
from itertools import islice

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune.model.merge_rounding import ROUNDINGS
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.hooks import Hook
from dualtune.train.objectives import comparison
from dualtune.train.state.metrics import each_row
from dualtune.train.state.run_dir import METRICS

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

import tiny_families  # noqa: E402

SIZES = tiny_families.SIZES
TARGETS = ("q_proj", "v_proj", "down_proj")
VOCAB = 46


@pytest.fixture
def weight():
    """A weight with rows that are all zeros, all positive, and very unlike."""
    w = np.random.default_rng(0).normal(0, 0.02, (16, 256)).astype(np.float32)
    w[3], w[5], w[7, ::64] = 0, np.abs(w[5]), 3
    return w


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounding_is_the_same_everywhere(weight, name):
    round_ = ROUNDINGS[name]
    expected = round_(weight, np)
    assert expected.dtype == np.float32 and np.abs(expected - weight).max() > 0
    assert np.array_equal(round_(torch.from_numpy(weight), torch).numpy(), expected)
    assert np.array_equal(np.array(round_(mx.array(weight), mx)), expected)
    odd = weight[:, :40]  # no whole groups
    assert np.array_equal(round_(odd, np), odd)


def test_a_rounding_is_that_of_the_format(weight):
    gguf = pytest.importorskip("gguf")
    for name in ("q4_0", "q8_0"):
        kind = gguf.GGMLQuantizationType[name.upper()]
        theirs = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        assert np.array_equal(ROUNDINGS[name](weight, np), theirs)
    for bits in (4, 8):
        packed = mx.quantize(mx.array(weight), 64, bits)
        theirs = np.array(mx.dequantize(*packed, group_size=64, bits=bits))
        assert np.array_equal(ROUNDINGS[f"affine{bits}"](weight, np), theirs)
    from dualtune_torch.weights import nf4

    theirs = nf4.unpack(*nf4.quantize(torch.from_numpy(weight), torch.float32)).numpy()
    largest = np.abs(weight).max()
    assert np.abs(ROUNDINGS["nf4"](weight, np) - theirs).max() <= 0.02 * largest  # of its scales, in 8 bits


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def load(backends, tiny):
    def load_(name, merge_for="none", model_dir=tiny.model_dir, method="lora", dropout=0.0, **options):
        spec = AdapterSpec(4, 6.0, dropout, TARGETS, method=method, merge_for=merge_for)
        request = LoadRequest(model_dir, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=5, **options)
        return backends[name].load(request)

    return load_


def rounded_base(model_dir, out, adapter, scale, name):
    """Write the base whose merge with this adapter is the rounded one: Q(W + scale · B A) − scale · B A.

    Of DoRA, Q is divided by m / ‖W + scale · B A‖; returns the m with which that base has the same factor.
    """
    out.mkdir()
    for file in model_dir.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    weights, magnitudes = load_file(model_dir / "model.safetensors"), {}
    for key in [key for key in weights if key.removesuffix(".weight").endswith(TARGETS)]:
        module = key.removesuffix(".weight")
        change = (scale * (adapter[tensor_name(module, "B")] @ adapter[tensor_name(module, "A")])).astype(np.float32)
        merged, m = weights[key].astype(np.float32) + change, tensor_name(module, "m", "dora")
        factors = (adapter[m] / np.linalg.norm(merged, axis=1))[:, None] if m in adapter else 1
        rounded = ROUNDINGS[name](factors * merged, np)
        weights[key] = rounded / factors - change
        if m in adapter:
            magnitudes[m] = np.linalg.norm(rounded, axis=1)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return magnitudes


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize(
    ("name", "method", "dropout"), [("affine4", "lora", 0), ("q4_0", "lora", 0.3), ("q4_0", "dora", 0.3)]
)
def test_training_is_that_of_the_method_on_the_rounded_base(load, tiny, tmp_path, backend, name, method, dropout):
    """Loss, log-probabilities and gradient, and what evaluations say; `logprobs` and generation do not round."""
    how = {"method": method, "dropout": dropout}
    engine, batch = load(backend, name, **how), random_batch([9, 7], VOCAB, seed=1)
    state = random_adapter(engine.adapter_state())
    magnitudes = rounded_base(tiny.model_dir, tmp_path / "base", state, 6.0 / 4, name)
    plain, on_rounded = load(backend, **how), load(backend, model_dir=tmp_path / "base", **how)
    for one in (engine, plain):
        one.load_adapter_state(state)
    on_rounded.load_adapter_state(state | magnitudes)
    in_training = engine.target_logprobs(batch, dropout=True)
    evaluated = engine.target_logprobs(batch)
    assert np.abs(in_training - on_rounded.target_logprobs(batch, dropout=True)).max() <= tolerances.LOGPROBS
    assert np.abs(evaluated - on_rounded.target_logprobs(batch)).max() <= tolerances.LOGPROBS
    assert (np.abs(in_training - evaluated).max() > 100 * tolerances.LOGPROBS) == (dropout > 0)
    gap = float(engine.evaluate(batch).loss_sum) - float(on_rounded.evaluate(batch).loss_sum)
    assert abs(gap) <= tolerances.LOGPROBS * batch.num_targets
    assert np.array_equal(engine.most_probable(batch), on_rounded.most_probable(batch))
    assert np.abs(evaluated - plain.target_logprobs(batch)).max() > 100 * tolerances.LOGPROBS
    # The gradient of a magnitude is that of the merge before it is rounded: see the next test.
    of_both = [gradient(one, batch) for one in (engine, on_rounded)]
    assert_close(*({n: g for n, g in one.items() if n not in magnitudes} for one in of_both), tolerances.GRADIENT)
    gap = np.abs(engine.logprobs(batch) - plain.logprobs(batch))
    assert gap[batch.segments_BT > 0].max() <= tolerances.LOGPROBS
    prompt = batch.tokens_BT[0, :5]
    texts = [list(islice(one.generate(prompt, choose=lambda x: int(x.argmax())), 4)) for one in (engine, plain)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize(("family", "dropout"), [("mixtral", 0.3), ("gpt_oss", 0.0), ("nemotron_h", 0.0)])
def test_experts_are_rounded_one_by_one(backends, tmp_path, backend, family, dropout):
    """Of gate and up, which transformers keeps in one parameter, Mixtral adapts one; gpt-oss has them by turns, with
    biases; Nemotron has no gate."""
    sizes = {
        "mixtral": SIZES | {"num_local_experts": 4, "intermediate_size": 64},
        "gpt_oss": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
        "nemotron_h": tiny_families.FAMILIES["nemotron_h"] | {"moe_intermediate_size": 64},
    }[family]
    model = tiny_families.write_family(family, tmp_path / "model", **sizes)
    targets = {"mixtral": ("w1", "w2", "q_proj")}.get(family, ("up_proj", "down_proj"))
    spec = AdapterSpec(4, 6.0, dropout, targets, experts=True)
    batch = random_batch([9, 7], SIZES["vocab_size"], seed=1)

    def load(model_dir, merge_for="none"):
        its = replace(spec, merge_for=merge_for)
        request = LoadRequest(model_dir, "float32", "auto", "pretrained", its, OptimizerSpec(), seed=5)
        return backends[backend].load(request)

    engine = load(model, "q4_0")
    state = random_adapter(engine.adapter_state())
    weights = load_file(model / "model.safetensors")
    for module, place in engine._places.items():
        matrix = weights[place.tensor] if place.expert is None else weights[place.tensor][place.expert]
        matrix = matrix.T if place.transposed else matrix
        matrix = matrix if place.rows is None else matrix[slice(*place.rows)]
        change = spec.scale * (state[tensor_name(module, "B")] @ state[tensor_name(module, "A")])
        matrix[:] = ROUNDINGS["q4_0"](matrix + change, np) - change
    shutil.copytree(model, tmp_path / "rounded")
    save_file(weights, tmp_path / "rounded" / "model.safetensors", {"format": "pt"})
    engines = [engine, load(tmp_path / "rounded"), load(model)]
    for one in engines:
        one.load_adapter_state(state)
    for how in ({}, {"dropout": True}):
        found, expected, plain = (one.target_logprobs(batch, **how) for one in engines)
        assert np.abs(found - expected).max() <= tolerances.LOGPROBS < np.abs(found - plain).max() / 10
    assert_close(*(gradient(one, batch) for one in engines[:2]), tolerances.GRADIENT)
    gap = (engine.logprobs(batch) - engines[2].logprobs(batch))[batch.segments_BT > 0]
    assert np.abs(gap).max() <= tolerances.LOGPROBS  # what is asked outside of training and evaluation is not rounded


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_what_rounds_nothing_is_the_method_itself(load, monkeypatch, backend):
    monkeypatch.setitem(vars(import_module(f"dualtune_{backend}.merged")), "ROUNDINGS", {"q4_0": lambda w, xp: w})
    batch, how = random_batch([9, 7], VOCAB, seed=1), {"method": "dora", "dropout": 0.3}
    engine, plain = load(backend, "q4_0", **how), load(backend, **how)
    state = random_adapter(engine.adapter_state())
    for one in (engine, plain):
        one.load_adapter_state(state)
    gap = engine.target_logprobs(batch, dropout=True) - plain.target_logprobs(batch, dropout=True)
    assert np.abs(gap).max() <= tolerances.LOGPROBS
    assert_close(gradient(engine, batch), gradient(plain, batch), tolerances.GRADIENT)


@pytest.mark.parametrize(("backend", "kernels"), [("torch", "auto"), ("mlx", "auto"), ("mlx", "fused")])
def test_a_merge_is_rounded_once_for_all_micro_batches_of_an_update(load, monkeypatch, backend, kernels):
    rounded = []

    def counted(weight, xp):
        rounded.append(weight.shape)
        return weight

    monkeypatch.setitem(vars(import_module(f"dualtune_{backend}.merged")), "ROUNDINGS", {"q4_0": counted})
    engine, batches = load(backend, "q4_0", kernels=kernels), [random_batch([9, 7], VOCAB, seed=n) for n in range(3)]
    layers = len(engine.adapter_shapes) // 2
    for _ in range(3):
        rounded.clear()
        expected = 0.0
        for batch in batches:
            engine.forward_backward(batch, divisor=60)
            expected += float(engine.evaluate(batch).loss_sum) / 60
        loss = float(engine.optim_step(lr=1e-2, max_grad_norm=1.0).loss)
        assert loss == pytest.approx(expected, abs=tolerances.STEP_LOSS)  # of these weights, also where it is compiled
        after = float(engine.evaluate(batches[0]).loss_sum)
    assert len(rounded) == layers
    engine.load_adapter_state(random_adapter(engine.adapter_state(), seed=3))
    assert abs(float(engine.evaluate(batches[0]).loss_sum) - after) > 1e-3


def test_no_merge_waits_for_the_backward_pass_where_the_base_moves(load, monkeypatch):
    made = []

    def kept(weight, xp):
        rounded = weight + 0.01
        made.append(weakref.ref(rounded))
        return rounded

    monkeypatch.setitem(vars(import_module("dualtune_torch.merged")), "ROUNDINGS", {"q4_0": kept})
    batch, results = random_batch([9, 7], VOCAB, seed=1), []
    for moves in (False, True):
        engine = load("torch", "q4_0")
        for layer in engine._layers.values():
            layer.moves = moves
        made.clear()
        inputs = engine._inputs(batch)
        with engine._dropout(inputs):
            loss = engine._loss_sum(inputs)
        alive = sum(merge() is not None for merge in made)
        assert (alive, len(made)) == (0 if moves else len(engine._layers), len(engine._layers))
        loss.backward()
        results.append(engine._adapter.flat.grad.clone())
    assert torch.equal(*results) and results[0].any()


def test_the_reference_of_a_run_that_rounds_is_another(load, backends, tiny):
    engine, base = load("torch", "q4_0"), {"weights_sha256": "0"}
    keys = [
        comparison._key(engine, backends["torch"], base, None, tiny.config(tiny.model_dir / "x", adapter=adapter))
        for adapter in ({}, {"dropout": 0.0, "merge_for": "q4_0"}, {"dropout": 0.0, "merge_for": "q8_0"})
    ]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == 3


class Stop(Hook):
    def on_step(self, record):
        if record.step == 5:
            raise KeyboardInterrupt


def test_both_backends_take_the_same_steps_and_a_run_moves(backends, tiny, tmp_path):
    adapter = {"merge_for": "q4_0", "rank": 4}  # with dropout, the default
    train = {"steps": 8, "learning_rate": 1e-3}

    def config(name):
        return tiny.config(tmp_path / name, adapter=adapter, train=train, run={"save_every": 2})

    results = [run(config(name), backends[name]) for name in ("torch", "mlx")]
    with pytest.raises(KeyboardInterrupt):
        run(config("moved"), backends["mlx"], [Stop()])
    results.append(run(config("moved"), backends["torch"]))
    first, *others = (
        [row["loss"] for row in each_row(result.run_dir / METRICS) if "loss" in row] for result in results
    )
    # A weight at the border of two codes may get the other one, so this is wider than for LoRA.
    for losses in others:
        assert losses == pytest.approx(first, abs=2e-4)
    spec = json.loads((results[0].adapter_dir / "adapter_config.json").read_text())
    assert spec["r"] == 4 and spec["lora_alpha"] == 16.0  # plain LoRA in every file


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("adapter: {merge_for: q4_0}\nmodel: {name: m, quantization: nf4}", "adapter.merge_for"),
        ("adapter: {merge_for: q5_9}", "adapter.merge_for"),
    ],
)
def test_what_does_not_go_together(lines, key):
    model = "" if "model:" in lines else "model: {name: m}\n"
    with pytest.raises(ConfigError, match=key):
        parse_config(f"{model}data: {{train: d.jsonl}}\n{lines}\n")


@pytest.mark.parametrize(("name", "quantization"), [("torch", "nf4"), ("mlx", "affine4")])
def test_a_base_that_is_packed_is_refused(backends, tiny, name, quantization):
    spec = AdapterSpec(4, 6.0, 0.0, ("q_proj",), merge_for="q4_0")
    request = LoadRequest(tiny.model_dir, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=5)
    with pytest.raises(ConfigError, match=r"adapter\.merge_for: got q4_0, but the base is quantized \(.*q_proj\)"):
        backends[name].load(request)


def test_the_plan_counts_the_merges(tiny):
    from dualtune.engine.memory.estimate import ask_of, estimate
    from dualtune.engine.memory.shapes import decoder_of
    from dualtune.model.config_file import read_config

    decoder = decoder_of(read_config(tiny.model_dir))
    plain = tiny.config(tiny.model_dir / "x", adapter={"dropout": 0.0})
    rounds = tiny.config(tiny.model_dir / "x", adapter={"dropout": 0.0, "merge_for": "q4_0"})
    before, after = (estimate(decoder, ask_of(config, decoder, "torch", "cpu")) for config in (plain, rounds))
    shapes = [(layer.out, layer.in_) for layer in decoder.linears().values()]
    expected = 4 * decoder.layers * sum(map(math.prod, shapes)) + 6 * 4 * max(map(math.prod, shapes))
    assert after.total_bytes - before.total_bytes == after["merges"] == expected
    ask = replace(ask_of(rounds, decoder, "torch", "cpu"), dropout=True, method="dora")
    streamed = estimate(decoder, replace(ask, dropout=False, resident_layers=1))["merges"]
    assert streamed == 4 * sum(map(math.prod, shapes)) + 6 * 4 * max(map(math.prod, shapes))
    inputs, outputs = (decoder.layers * sum(shape[axis] for shape in shapes) for axis in (1, 0))
    dropped = ask.cells * (5 * inputs + 4 * outputs)  # what dropout changes and its mask, a second output
    assert estimate(decoder, ask)["merges"] == expected + dropped
    recomputed = replace(ask, checkpointing=ActivationCheckpointing(decoder.layers - 1))  # one, and the last
    assert estimate(decoder, recomputed)["merges"] == expected + 2 * dropped // decoder.layers
