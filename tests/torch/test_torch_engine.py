"""The torch engine inside: what of the model is frozen, and what the base computes, held against raw transformers."""

import gc
import json

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.1, targets=("q_proj", "o_proj", "down_proj"))
BATCH = random_batch([9, 16, 5, 12], 96)


@pytest.fixture
def load(open_backend):
    backend = open_backend("torch")

    def load_(model_dir, *, dtype="float32", quantization="auto", init="pretrained", kernels="auto"):
        return backend.load(
            LoadRequest(model_dir, dtype, quantization, init, SPEC, OptimizerSpec(), seed=4, kernels=kernels)
        )

    return load_


@pytest.fixture(params=["untied", "tied", "stories260k"])
def model_dir(request, tmp_path, shared):
    if request.param == "stories260k":
        return shared("models/stories260k")
    return write_tiny_llama(tmp_path / "model", tie_word_embeddings=request.param == "tied")


def base_bytes(engine):
    tensors = {n: w for n, w in engine.model.state_dict().items() if ".lora_" not in n}
    return {n: w.contiguous().view(torch.uint8).numpy().tobytes() for n, w in tensors.items()}


def train(engine, steps=3):
    for seed in range(steps):
        batch = random_batch([9, 16], 96, seed=seed)
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-2, max_grad_norm=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_fresh_adapter_leaves_the_numbers_of_transformers_bit_for_bit(dtype, model_dir, load):
    raw = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    with torch.no_grad():
        expected = raw(torch.from_numpy(BATCH.tokens_BT).long()).logits.float().log_softmax(-1).numpy()
    engine = load(model_dir, dtype=dtype, kernels="reference")
    assert np.array_equal(engine.logprobs(BATCH), expected)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    assert not np.array_equal(engine.logprobs(BATCH), expected)


def test_the_adapter_alone_is_trained(model_dir, load):
    engine = load(model_dir)
    before = base_bytes(engine)
    train(engine)
    batch = random_batch([9, 16], 96)
    engine.forward_backward(batch, divisor=batch.num_targets)
    trained = {n: p for n, p in engine.model.named_parameters() if p.requires_grad}
    config = json.loads((model_dir / "config.json").read_text())
    assert len(trained) == 2 * len(SPEC.targets) * config["num_hidden_layers"]
    assert all(n.endswith(("lora_A", "lora_B")) and p.grad.any() for n, p in trained.items())
    assert all(p.dtype == torch.float32 for p in trained.values())
    assert not [n for n, p in engine.model.named_parameters() if n not in trained and p.grad is not None]
    assert base_bytes(engine) == before


def test_master_weights_are_float32_whatever_the_model_computes_in(load, tmp_path):
    """A step of 1e-7 is lost in bfloat16 numbers, and kept here."""
    engine = load(write_tiny_llama(tmp_path / "model"), dtype="bfloat16")
    before = engine.adapter_state()
    engine.forward_backward(BATCH, divisor=BATCH.num_targets)
    engine.optim_step(lr=1e-7, max_grad_norm=None)
    moved = [n for n, w in engine.adapter_state().items() if "lora_B" in n and not np.array_equal(w, before[n])]
    assert len(moved) == 6
    assert {p.dtype for n, p in engine.model.named_parameters() if ".lora_" not in n} == {torch.bfloat16}


def test_a_step_is_made_without_waiting_for_the_device(load, tmp_path):
    """float(), .item() and bool() of a tensor are all one operation, _local_scalar_dense; a step has none."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **kwargs or {})

    names = []
    engine = load(write_tiny_llama(tmp_path / "model"))
    for max_norm in (None, 1.0):
        engine.forward_backward(BATCH, divisor=BATCH.num_targets)
        with Operations():
            output = engine.optim_step(lr=1e-2, max_grad_norm=max_norm)
    assert any("_fused_adamw_" in name for name in names)
    assert not [name for name in names if "_local_scalar_dense" in name]
    with Operations():
        float(output.loss)
    assert "_local_scalar_dense" in names[-1], "this test would not have seen it"


def test_a_stored_nf4_model_keeps_its_bytes(load, tmp_path):
    """A directory that transformers quantized and saved is the same base as quantizing the plain one on loading, and
    computes in our dtype, not in the one that it was saved with."""
    plain, stored = write_tiny_llama(tmp_path / "plain"), tmp_path / "stored"
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bfloat16"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="float32", quantization_config=quantization)
    model.save_pretrained(stored)
    engine = load(stored)
    assert engine.description.quantization == "nf4"
    assert np.array_equal(engine.logprobs(BATCH), load(plain, quantization="nf4").logprobs(BATCH))
    train(engine)
    assert engine.adapter_state()
    with pytest.raises(ConfigError, match="got 'none'"):
        load(stored, quantization="none")


@pytest.mark.parametrize("changes", [
    {"quantization": {"group_size": 32, "bits": 4}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}},
], ids=["mlx", "gptq", "fp4"])  # fmt: skip
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_another_quantization_is_refused_by_name(changes, init, load, tmp_path):
    model_dir = write_tiny_llama(tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match="quantized"):
        load(model_dir, init=init)


def test_random_weights_are_quantized_one_by_one(load, tmp_path, monkeypatch, unscanned):
    """A plain 7B model may not fit where the quantized one does."""
    pytest.importorskip("bitsandbytes")
    from dualtune_torch.weights import nf4

    def plain_layers():
        return sum(type(x) is torch.nn.Linear and x.weight.device.type != "meta" for x in gc.get_objects())

    alive, quantize = [], nf4.linear

    def counted(*arguments, dtype):
        alive.append(plain_layers())
        return quantize(*arguments, dtype)

    monkeypatch.setattr(nf4, "linear", counted)
    engine = load(write_tiny_llama(tmp_path / "model"), quantization="nf4", init="random")
    assert len(alive) > 7 and max(alive) <= 2  # the one at hand, and the one before it
    assert np.isfinite(engine.logprobs(BATCH)).all()
    norms = [p for name, p in engine.model.named_parameters() if "norm" in name]
    assert norms and all((p == 1).all() for p in norms)
