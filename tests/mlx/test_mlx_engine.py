"""The MLX engine inside: what of the model is frozen, and what the base computes, held against raw mlx-lm."""

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest, SharedBase
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
tree_flatten = pytest.importorskip("mlx.utils").tree_flatten
mlx_utils = pytest.importorskip("mlx_lm.utils")

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.1, targets=("q_proj", "o_proj", "down_proj"))
BATCH = random_batch([9, 16, 5, 12], 96)


@pytest.fixture
def load(open_backend):
    backend = open_backend("mlx")

    def load_(model_dir, *, dtype="float32", quantization="auto", init="pretrained"):
        return backend.load(LoadRequest(model_dir, dtype, quantization, init, SPEC, OptimizerSpec(), seed=4))

    return load_


@pytest.fixture(params=["untied", "tied", "stories260k"])
def model_dir(request, tmp_path, shared):
    if request.param == "stories260k":
        return shared("models/stories260k")
    return write_tiny_llama(tmp_path / "model", tie_word_embeddings=request.param == "tied")


@pytest.fixture
def stored(tmp_path):
    """(a plain model, the same as mlx-lm quantizes and saves it)."""
    plain = write_tiny_llama(tmp_path / "plain")
    model, config = mlx_utils.quantize_model(*mlx_utils.load_model(plain), group_size=64, bits=4)
    mlx_utils.save_model(tmp_path / "stored", model)
    mlx_utils.save_config(config, tmp_path / "stored/config.json")
    return plain, tmp_path / "stored"


def base_bytes(model):
    """Of an engine's model or mlx-lm's own, in the names of the latter."""
    return {n.replace(".base.", "."): bytes(memoryview(w)) for n, w in tree_flatten(model.parameters())}


def train(engine, steps=3):
    for seed in range(steps):
        batch = random_batch([9, 16], 96, seed=seed)
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-2, max_grad_norm=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_fresh_adapter_leaves_the_numbers_of_mlx_lm_bit_for_bit(dtype, model_dir, load):
    raw, _ = mlx_utils.load_model(model_dir)
    raw.set_dtype(getattr(mx, dtype))
    logits = raw(mx.array(BATCH.tokens_BT)).astype(mx.float32)
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    engine = load(model_dir, dtype=dtype)
    assert np.array_equal(engine.logprobs(BATCH), expected)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    assert not np.array_equal(engine.logprobs(BATCH), expected)


def test_the_adapter_alone_is_trained(model_dir, load):
    engine = load(model_dir)
    assert base_bytes(engine.model) == base_bytes(mlx_utils.load_model(model_dir)[0])
    start = engine.adapter_state()
    train(engine)
    config = json.loads((model_dir / "config.json").read_text())
    assert len(start) == 2 * len(SPEC.targets) * config["num_hidden_layers"]
    assert not [n for n, w in engine.adapter_state().items() if np.array_equal(w, start[n])]
    assert not tree_flatten(engine.model.trainable_parameters())
    assert base_bytes(engine.model) == base_bytes(mlx_utils.load_model(model_dir)[0])


def test_master_weights_are_float32_whatever_the_model_computes_in(load, tmp_path):
    """A step of 1e-7 is lost in bfloat16 numbers, and kept here."""
    engine = load(write_tiny_llama(tmp_path / "model"), dtype="bfloat16")
    before = engine.adapter_state()
    engine.forward_backward(BATCH, divisor=BATCH.num_targets)
    engine.optim_step(lr=1e-7, max_grad_norm=None)
    moved = [n for n, w in engine.adapter_state().items() if "lora_B" in n and not np.array_equal(w, before[n])]
    assert len(moved) == 6
    assert {w.dtype for _, w in tree_flatten(engine.model.parameters())} == {mx.bfloat16}


def test_a_step_is_made_without_waiting_for_the_device(load, tmp_path, monkeypatch):
    """MLX refuses to evaluate what it traces, so a step that can be traced reads no number back."""
    engine = load(write_tiny_llama(tmp_path / "model"))
    monkeypatch.setattr(mx, "async_eval", lambda *_: None)

    def step(loss, grads):
        engine._loss, engine._grads = loss, grads
        output = engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        return output.loss, output.grad_norm, engine._step

    arguments = mx.array(1.0), mx.ones_like(engine._params)
    assert mx.compile(step)(*arguments)[2].item() == 1.0


@pytest.mark.parametrize("beta", [0.9, 0.999])
def test_the_bias_corrections_keep_their_digits(beta):
    """They are computed in float32, where the plain subtraction 1 − 0.999^step is 2e-5 off in early steps."""
    steps = np.arange(1, 100_001)
    got = np.array(importlib.import_module("dualtune_mlx.optimizer").one_minus_power(beta, mx.array(steps * 1.0)))
    assert got.dtype == np.float32
    assert np.allclose(got, 1 - beta**steps, rtol=1e-6, atol=0.0)


def test_affine4_makes_the_bytes_of_mlx_lm(stored, load):
    plain, quantized = stored
    expected = base_bytes(mlx_utils.load_model(quantized)[0])
    assert any(name.endswith(".scales") for name in expected)
    for engine in (load(plain, quantization="affine4"), load(quantized), load(quantized, quantization="affine4")):
        assert engine.description.quantization == "affine4"
        assert base_bytes(engine.model) == expected
    with pytest.raises(ConfigError, match="got 'none'"):
        load(quantized, quantization="none")


def test_random_init_is_quantized_like_the_directory(stored, load):
    """It is there to measure memory, so it must take as much as the real weights."""
    sizes = []
    for engine in (load(stored[1]), load(stored[1], init="random")):
        parameters = tree_flatten(engine.model.parameters())
        sizes.append({name: (w.shape, w.dtype) for name, w in parameters})
    assert sizes[0] == sizes[1]


def test_loading_prints_nothing_to_standard_output(load, tmp_path, capfd):
    """`dualtune generate` writes the model's answer there."""
    load(write_tiny_llama(tmp_path / "model"), quantization="affine4")
    assert capfd.readouterr().out == ""


def test_a_quantization_of_another_framework_is_refused_by_name(load, tmp_path):
    model_dir = write_tiny_llama(tmp_path / "model", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ConfigError, match="bitsandbytes"):
        load(model_dir)


def test_a_module_that_mlx_lm_renames_is_called_as_in_the_files(open_backend, tmp_path):
    """An adapter under a name that the model's files do not have could be loaded by no other program."""
    pytest.importorskip("torch")
    import transformers

    config = transformers.GPTNeoXConfig(
        vocab_size=96, hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    spec = AdapterSpec(4, 6.0, 0.0, ("query_key_value",))
    request = LoadRequest(tmp_path, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=0)
    module = "gpt_neox.layers.0.attention.query_key_value"
    state = open_backend("mlx").load(request).adapter_state()
    assert {name.rsplit(".", 2)[0] for name in state} == {f"base_model.model.{module}"}


def test_documents_beyond_an_ignored_window_are_refused(open_backend, tmp_path):
    """mlx-lm's Mistral attends to everything, Hugging Face's in a window: equal up to its length, and only there."""
    path = write_tiny_llama(
        tmp_path / "model", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8
    )
    request = LoadRequest(path, "float32", "auto", "pretrained", SPEC, OptimizerSpec(), seed=4)
    batches = {n: random_batch([n], 96) for n in (8, 16)}
    mlx, torch = (open_backend(name).load(request) for name in ("mlx", "torch"))
    gaps = {n: np.abs(mlx.logprobs(batch) - torch.logprobs(batch)).max() for n, batch in batches.items()}
    assert gaps[8] <= 1e-5 and gaps[16] > 1e-2, gaps
    request = replace(request, shared_base=SharedBase())  # a sweep may try longer documents on the same base
    open_backend("mlx").load(replace(request, longest=8))
    with pytest.raises(ConfigError, match=r"data.max_length: the longest document has 16 tokens.*window of 8"):
        open_backend("mlx").load(replace(request, longest=16))
