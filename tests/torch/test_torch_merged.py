"""A merged model is written tensor by tensor: the bytes of the library's writer, and one matrix at a time."""

import json
import weakref

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import write_tiny_gpt2, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("all-linear",))
FULL = AdapterSpec(rank=1, alpha=1.0, dropout=0.0, targets=(), method="full")


@pytest.fixture
def load(open_backend, tmp_path):
    backend = open_backend("torch")

    def load_(write, dtype, spec=SPEC, init="pretrained", **changes):
        path = write(tmp_path / "model", **changes)
        engine = backend.load(LoadRequest(path, dtype, "auto", init, spec, OptimizerSpec(), seed=4))
        if spec is SPEC:
            engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_file_is_that_of_the_library(load, tmp_path, dtype, tied):
    engine = load(write_tiny_llama, dtype, tie_word_embeddings=tied)
    engine.save_merged(tmp_path / "merged")
    expected = {n: w.to(getattr(torch, dtype)) for n, w in load_file(tmp_path / "model" / "model.safetensors").items()}
    deltas = {f"{module}.weight": layer.delta() for module, layer in engine._layers.items()}
    if dtype != "float32":  # rounded once, from the sum
        expected |= load_file(tmp_path / "model" / "model.safetensors")
    expected |= {name: expected[name].float() + delta.detach() for name, delta in deltas.items()}
    save_file(
        {n: w.to(getattr(torch, dtype)).contiguous() for n, w in expected.items()},
        tmp_path / "expected.safetensors",
        {"format": "pt"},
    )
    assert ("lm_head.weight" in expected) is not tied
    written = (tmp_path / "merged" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "expected.safetensors").read_bytes()


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_gpt2])
def test_one_matrix_is_computed_at_a_time(load, tmp_path, write, monkeypatch):
    engine, computed = load(write, "float32"), []
    layer_class = type(next(iter(engine._layers.values())))
    delta = layer_class.delta

    def watched(self, *number):
        assert all(each() is None for each in computed)
        found = delta(self, *number)
        computed.append(weakref.ref(found))
        return found

    monkeypatch.setattr(layer_class, "delta", watched)
    engine.save_merged(tmp_path / "merged")
    assert len(computed) == len(engine._layers)


def test_a_base_that_is_in_no_file_is_refused(load, tmp_path):
    with pytest.raises(ConfigError, match=r"initialized at random \(model.init: random\), and is in no file"):
        load(write_tiny_llama, "float32", init="random").save_merged(tmp_path / "merged")


def test_what_was_trained_whole_has_the_names_of_its_base_and_all_else_is_copied(load, tmp_path):
    """Experts are one parameter in transformers, and many tensors in the files."""
    mixtral = transformers_mixtral(tmp_path / "made")
    engine = load(lambda path, **_: mixtral, "float32", FULL)
    engine.save_merged(tmp_path / "merged")
    base, written = (load_file(d / "model.safetensors") for d in (mixtral, tmp_path / "merged"))
    assert written.keys() == base.keys()
    assert all(torch.equal(written[name], base[name].float()) for name in base)


def transformers_mixtral(path):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=3, pad_token_id=0,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(path)
    assert len([name for name in load_file(path / "model.safetensors") if ".experts.2." in name]) == 6
    return path


def test_buffers_of_the_files_are_copied(load, tmp_path):
    def write(path, **_):
        write_tiny_llama(path)
        tensors = load_file(path / "model.safetensors")
        frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8).float()}
        save_file(tensors | frequencies, path / "model.safetensors", {"format": "pt"})
        return path

    engine = load(write, "float32")
    engine.save_merged(tmp_path / "merged")
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert written["model.layers.0.self_attn.rotary_emb.inv_freq"].tolist() == np.arange(8).tolist()
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "llama"
