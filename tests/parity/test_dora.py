"""DoRA: PEFT, mlx-lm and all engines compute one function, learn the same from it, and merge it to the same weights."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, parse_name
from dualtune.model.dropout import channel_keys, keep_mask
from dualtune.model.formats.directory import read_adapter
from dualtune.model.methods.dora import METHOD, row_norms
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
mx = pytest.importorskip("mlx.core")

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
SPEC = AdapterSpec(4, 6.0, 0.0, TARGETS, method="dora")
VOCAB = 46


@pytest.fixture
def load(backends, tiny):
    def load_(name, spec=SPEC, model_dir=tiny.model_dir, dtype="float32", quantization="auto", **options):
        request = LoadRequest(model_dir, dtype, quantization, "pretrained", spec, OptimizerSpec(), seed=5, **options)
        return backends[name].load(request)

    return load_


# --- training ---------------------------------------------------------------------------------------------------------


def losses_of(engine, batches, steps):
    losses = []
    for step in steps:
        batch = batches[step % len(batches)]
        engine.forward_backward(batch, divisor=batch.num_targets)
        losses.append(float(engine.optim_step(lr=3e-3, max_grad_norm=0.3).loss))
    return losses


def test_each_step_is_that_of_peft(load, tiny, train_in_peft):
    """The start and the detached norm: any other choice is another loss."""
    batches = [random_batch([9, 16, 5, 12], VOCAB, seed=s) for s in range(4)]
    _, expected = train_in_peft(tiny.model_dir, SPEC, batches, steps=16)
    assert expected[-1] < expected[0] - 0.1, "nothing was learned, so nothing is shown"
    for name in ("torch", "mlx"):
        found = losses_of(load(name), batches, range(16))
        gap = np.abs(np.array(found) - expected).max()
        print(f"{name}: {gap:.1e}")
        assert gap <= tolerances.STEP_LOSS, name


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_with_dropout_only_the_update_reads_the_dropped_input(load, gpt2, name):
    """The gradients are those of the equation of mlx-lm's layer by autograd in float64, with biases."""
    spec = replace(SPEC, targets=("c_attn", "c_fc"), dropout=0.3)
    engine = load(name, spec, model_dir=gpt2.model_dir)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    state, batch = engine.adapter_state(), random_batch([9, 16, 5, 12], VOCAB)
    reference = transformers.AutoModelForCausalLM.from_pretrained(gpt2.model_dir, dtype=torch.float64)
    for module in engine._layers:
        parts = {part: torch.from_numpy(x).double().requires_grad_() for part, x in values_of(state, module).items()}
        old = reference.get_submodule(module)
        reference.set_submodule(module, MlxLMsDoRA(old, module, parts, spec, batch.dropout_seeds_BT))
    logits = reference(
        input_ids=torch.from_numpy(batch.tokens_BT).long(), attention_mask=torch.from_numpy(batch.segments_BT)
    ).logits
    labels = torch.from_numpy(batch.labels_BT).long().flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    (loss / batch.num_targets).backward()
    expected = {
        f"base_model.model.{module}.{end}": reference.get_submodule(module).parts[part].grad.numpy()
        for module in engine._layers
        for part, end, _ in METHOD.parameters
    }
    assert_close(gradient(engine, batch), expected, tolerances.GRADIENT)


class MlxLMsDoRA(torch.nn.Module):
    """mlx_lm.tuner.dora.DoRALinear in torch, on a Conv1D of GPT-2, with the mask that is a function of the seeds."""

    def __init__(self, base, module, parts, spec, seeds):
        super().__init__()
        self.W, self.bias, self.parts = base.weight.detach().T, base.bias.detach(), parts
        mask = keep_mask(seeds, channel_keys(module, self.W.shape[1]), spec.dropout)
        self.mask, self.scale = torch.from_numpy(mask / (1 - spec.dropout)), spec.scale_of(module)

    def forward(self, x):
        A, B, m = (self.parts[part] for part in "ABm")
        norms = torch.linalg.norm(self.W + self.scale * B @ A, dim=1).detach()
        return (m / norms) * (x @ self.W.T + self.scale * (x * self.mask) @ A.T @ B.T) + self.bias


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_resumed_engine_takes_the_same_steps_to_the_bit(load, name):
    batches, spec = [random_batch([9, 16, 5, 12], VOCAB, seed=s) for s in range(2)], replace(SPEC, dropout=0.2)
    engine = load(name, spec)
    losses_of(engine, batches, range(3))
    again = load(name, spec)
    again.load_adapter_state(engine.adapter_state())
    again.load_optimizer_state(engine.optimizer_state())
    assert losses_of(again, batches, range(3, 6)) == losses_of(engine, batches, range(3, 6))
    assert_equal(again.adapter_state(), engine.adapter_state())


# --- the base ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("torch", "nf4"), ("torch", "int8"), ("torch", "affine4"), ("mlx", "int8"), ("mlx", "affine4")],
)
def test_the_norm_is_of_the_unpacked_weight(load, name, quantization):
    engine = load(name, quantization=quantization)
    start = engine.neutral_state()
    engine.load_adapter_state(random_adapter(start))
    state = engine.adapter_state()
    for module, layer in engine._layers.items():
        W = engine._frozen(module)
        np.testing.assert_allclose(values_of(start, module)["m"], row_norms(W), rtol=1e-6)
        x = np.random.default_rng(0).normal(size=(1, 5, W.shape[1])).astype(np.float32)
        y = layer(mx.array(x)) if name == "mlx" else layer(torch.from_numpy(x)).detach()
        expected = x @ (W + METHOD.delta(values_of(state, module), SPEC.scale, lambda W=W: W)).T
        np.testing.assert_allclose(np.array(y), expected, atol=1e-5 * np.abs(expected).max())


def values_of(tensors, module):
    return {part: tensors[f"base_model.model.{module}.{end}"] for part, end, _ in METHOD.parameters}


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_biases_are_not_scaled(load, gpt2, tmp_path, name):
    """Nor are the weights of GPT-2, which are stored transposed, taken by their columns."""
    spec = replace(SPEC, targets=("c_attn", "c_fc"), dropout=0.3)
    stored = load_file(gpt2.model_dir / "model.safetensors")
    assert min(np.abs(x).max() for n, x in stored.items() if n.endswith(("c_attn.bias", "c_fc.bias"))) > 0.01
    engine, batch = load(name, spec, model_dir=gpt2.model_dir), random_batch([9, 16, 5, 12], VOCAB)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    engine.save_merged(tmp_path / "merged")
    merged, real = load(name, spec, model_dir=tmp_path / "merged").logprobs(batch), batch.segments_BT > 0
    assert np.abs(merged - engine.logprobs(batch))[real].max() <= tolerances.MERGE


def test_a_row_that_vanishes_or_is_zero_gives_finite_numbers(load, tiny, tmp_path):
    """W + s B A is zero in one row, and W itself in another: what is left there is rounding, and is not divided by."""
    weights = load_file(tiny.model_dir / "model.safetensors")
    path = tmp_path / "model"
    shutil.copytree(tiny.model_dir, path)
    name, module = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj"
    weights[name][3] = 0.0
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    batch = random_batch([9, 16, 5, 12], VOCAB)
    for backend in ("torch", "mlx"):
        engine = load(backend, replace(SPEC, targets=("q_proj",)), model_dir=path)
        state = {parse_name(n): x for n, x in engine.neutral_state().items()}
        assert state[module, "m"][3] == 0.0
        state[module, "A"][0] = weights[name][5]
        state[module, "B"][:] = 0.0
        state[module, "B"][5, 0] = -1 / SPEC.scale
        engine.load_adapter_state({n: state[parse_name(n)] for n in engine.adapter_shapes})
        assert all(np.isfinite(g).all() for g in gradient(engine, batch).values())
        assert np.isfinite(engine.logprobs(batch)).all()


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_in_bfloat16_the_magnitudes_keep_their_digits(load, name):
    """Rounded to bfloat16 they would scale a fresh adapter's outputs by up to 0.4 %; the gradient is about right."""
    batch, state = random_batch([9, 16, 5, 12], VOCAB), random_adapter(load("torch").neutral_state())
    fresh = [losses_of(load(name, replace(SPEC, method=m), dtype="bfloat16"), [batch], [0]) for m in ("lora", "dora")]
    assert fresh[0] == fresh[1]
    found = gradient(load_with(load, name, state, dtype="bfloat16"), batch)
    assert_close(found, gradient(load_with(load, "torch", state), batch), 0.06)


def load_with(load, name, state, **options):
    engine = load(name, **options)
    engine.load_adapter_state(state)
    return engine


def test_streamed_layers_compute_the_same(load, tiny):
    """On torch, which has the weights of a layer while it computes; on MLX they are refused by name."""
    full = ActivationCheckpointing("all")
    batch, state = random_batch([9, 16, 5, 12], VOCAB), random_adapter(load("torch").neutral_state())
    streamed = load_with(load, "torch", state, resident_layers=1, checkpointing=full)
    assert_equal(gradient(streamed, batch), gradient(load_with(load, "torch", state, checkpointing=full), batch))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_trained_adapter_is_one_function_everywhere(name, backends, tiny, assert_one_function, tmp_path):
    """A run writes a directory that PEFT, mlx-lm, both engines and the formula read; merged it is the same model."""
    ranks, alphas = {"q_proj": 3}, {"layers.0.self_attn.o_proj": 5.0}
    config = tiny.config(
        tmp_path / "run",
        adapter={
            "method": "dora",
            "rank": 6,
            "alpha": 3.0,
            "targets": list(TARGETS),
            "dropout": 0.1,
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
        },
        train={"steps": 6, "learning_rate": 1e-2, "warmup": 0, "schedule": "constant"},
    )
    path = run(config, backends[name]).adapter_dir
    assert json.loads((path / "adapter_config.json").read_text())["use_dora"] is True
    assert_one_function(tiny, path)
    longer = tiny.oracle(path, lambda n, w: w * 1.01 if parse_name(n)[1] == "m" else w)
    assert tiny.gap(longer, tiny.oracle(path)) > 1e-3, "the magnitudes do nothing, so nothing is shown"
    adapter = read_adapter(path)
    weights = load_file(tiny.model_dir / "model.safetensors")
    engine = backends[name].load(
        LoadRequest(tiny.model_dir, "float32", "auto", "pretrained", adapter.spec, OptimizerSpec(), seed=5)
    )
    engine.load_adapter_state(adapter.tensors)
    engine.save_merged(tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for module in engine._layers:
        values, W = values_of(adapter.tensors, module), weights[f"{module}.weight"]
        scale = 1.0 if "q_proj" in module else 5 / 6 if "0.self_attn.o_proj" in module else 0.5
        change = METHOD.delta(values, scale, lambda W=W: W)
        np.testing.assert_allclose(merged[f"{module}.weight"] - W, change, atol=1e-6)
        np.testing.assert_allclose(row_norms(merged[f"{module}.weight"]), values["m"], rtol=1e-5)
