"""Biases that are trained beside an adapter: PEFT's steps and files, on both engines."""

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_equal
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, is_of_base
from dualtune.model.beside import BesideAdapter, trained_biases
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("mlx.core")

TARGETS, VOCAB, STEPS = ("c_attn", "c_fc"), 46, 8
BATCHES = [random_batch([9, 16, 5, 12], VOCAB, seed=seed) for seed in range(2)]
WAYS = [("lora_only", "lora"), ("all", "lora"), ("lora_only", "dora")]


def spec_of(bias, method="lora"):
    return AdapterSpec(4, 6.0, 0.0, TARGETS, method=method, beside=BesideAdapter(bias=bias))


@pytest.fixture
def load(backends, gpt2):
    def load_(name, spec, model_dir=None, quantization="auto"):
        path = model_dir or gpt2.model_dir
        request = LoadRequest(path, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=5)
        return backends[name].load(request)

    return load_


def trained(engine, steps=range(STEPS)):
    losses = []
    for step in steps:
        batch = BATCHES[step % 2]
        engine.forward_backward(batch, divisor=batch.num_targets)
        losses.append(float(engine.optim_step(lr=3e-3, max_grad_norm=0.3).loss))
    return losses


def sloped(name, bias):
    """Leave out the bias of keys, which changes no attention: Adam makes steps of the rounding of its gradient."""
    return np.delete(bias, np.s_[len(bias) // 3 : 2 * len(bias) // 3]) if "c_attn" in name else bias


@pytest.mark.parametrize(("bias", "method"), WAYS)
def test_each_step_and_each_file_is_peft_s(load, gpt2, tmp_path, train_in_peft, bias, method):
    spec = spec_of(bias, method)
    model, expected = train_in_peft(gpt2.model_dir, spec, BATCHES, STEPS, fan_in_fan_out=True)
    model.save_pretrained(tmp_path / "peft")
    theirs = read_adapter(tmp_path / "peft")
    assert theirs.spec.beside.bias == bias
    for name in ("torch", "mlx"):
        engine = load(name, spec)
        start = engine.adapter_state()
        biases = [n for n in start if is_of_base(n)]
        assert len(biases) == (4 if bias == "lora_only" else 2 * 6 + 1) and all(n.endswith(".bias") for n in biases)
        assert np.abs(np.array(trained(engine)) - expected).max() <= tolerances.STEP_LOSS, name
        state = engine.adapter_state()
        assert theirs.tensors.keys() == state.keys()
        assert max(np.abs(sloped(n, state[n] - theirs.tensors[n])).max() for n in biases) <= 1e-4
        assert all(np.abs(sloped(n, state[n] - start[n])).max() > 1e-3 for n in biases), "no bias moved"
        write_adapter(tmp_path / name, Adapter(spec, state, str(gpt2.model_dir), fan_in_fan_out=True))
        again = read_adapter(tmp_path / name)
        assert again.spec.beside.bias == bias
        assert_equal(again.tensors, state)
        base = transformers.AutoModelForCausalLM.from_pretrained(gpt2.model_dir, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / name).eval()
        tokens = torch.from_numpy(BATCHES[0].tokens_BT[1:2]).long()
        with torch.no_grad():
            logprobs = loaded(input_ids=tokens).logits.log_softmax(-1).numpy()
        assert np.abs(logprobs - engine.logprobs(BATCHES[0])[1:2]).max() <= tolerances.LOGPROBS
        engine.save_merged(tmp_path / f"merged-{name}")
        merged = load(name, AdapterSpec(4, 6.0, 0.0, ()), tmp_path / f"merged-{name}").logprobs(BATCHES[0])
        real = BATCHES[0].segments_BT > 0
        assert np.abs(merged - engine.logprobs(BATCHES[0]))[real].max() <= tolerances.MERGE


@pytest.mark.parametrize(("first", "second"), [("torch", "mlx"), ("mlx", "mlx"), ("torch", "torch")])
def test_a_run_continues_on_either_backend(load, first, second):
    begun, other = (load(name, spec_of("all")) for name in (first, second))
    trained(begun, range(4))
    other.load_adapter_state(begun.adapter_state())
    other.load_optimizer_state(begun.optimizer_state())
    found, expected = (trained(engine, range(4, 8)) for engine in (other, begun))
    gap = np.abs(np.array(found) - expected).max()
    assert gap <= (0 if first == second else tolerances.STEP_LOSS)


@pytest.mark.parametrize(("name", "quantization"), [("torch", "int8"), ("mlx", "affine4")])
def test_biases_of_packed_layers_are_trained_too(load, name, quantization):
    engine = load(name, spec_of("lora_only"), quantization=quantization)
    start = engine.adapter_state()
    trained(engine, range(2))
    assert all((w != start[n]).any() for n, w in engine.adapter_state().items() if is_of_base(n))


def test_what_has_no_bias_is_refused(load, tiny):
    for name in ("torch", "mlx"):
        for bias, whose in (("all", "this model has none"), ("lora_only", "no adapted layer of this model has one")):
            spec = AdapterSpec(4, 6.0, 0.0, ("q_proj",), beside=BesideAdapter(bias=bias))
            with pytest.raises(ConfigError, match=rf"adapter.bias: got {bias}, but {whose}"):
                load(name, spec, tiny.model_dir)


def test_a_file_without_biases_has_none_whatever_it_asked_for(tiny, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], bias="all")).save_pretrained(tmp_path)
    assert read_adapter(tmp_path).spec.beside == BesideAdapter()


def test_a_module_that_is_trained_whole_keeps_its_bias():
    beside = BesideAdapter(modules=("ln_f",), bias="all")
    parameters = ["transformer.ln_f.bias", "transformer.h.0.ln_1.bias", "transformer.h.0.ln_1.weight"]
    assert trained_biases(beside, parameters, ()) == ["transformer.h.0.ln_1.bias"]
