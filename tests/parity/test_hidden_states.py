"""Hidden states that are given to an engine, in every format of the base and dtype, and in compiled code."""

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.data.documents import in_memory
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.conformance_state import ROWS, with_hidden_states
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.activation_cache import try_on

FORMS = {
    "torch": ("float32", "bfloat16", "float16", "nf4", "int8", "affine4", "affine8"),
    "mlx": ("float32", "bfloat16", "float16", "int8", "affine4", "affine8", "compiled"),
}
BITS = {"bfloat16": np.uint16, "float16": np.float16}
UPPER = tuple(f"layers.{i}.{name}" for i in (2, 3) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"))


@pytest.fixture(params=[(backend, form) for backend, forms in FORMS.items() for form in forms], ids="-".join)
def loaded(request, open_backend, tmp_path):
    """(engine with an adapter on the upper half, form)"""
    backend, form = request.param
    dtype = form if form in BITS else "float32"
    quantization = "auto" if form in ("float32", "compiled", *BITS) else form
    model = write_tiny_llama(tmp_path / "llama", num_hidden_layers=4)
    spec = AdapterSpec(4, 6.0, 0.2, UPPER)
    engine = open_backend(backend).load(
        LoadRequest(
            model,
            dtype,
            quantization,
            "pretrained",
            spec,
            OptimizerSpec(),
            seed=4,
            kernels="fused" if form == "compiled" else "auto",
        )
    )
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine, form


def test_what_is_given_is_what_is_computed(loaded):
    """In rows of the same shape nothing is rounded otherwise, so the bits are the same."""
    engine, form = loaded
    batch = random_batch([9, 16, 5, 12], 96)
    assert engine.description.layers_below_adapter == 2
    cached, fresh = with_hidden_states(engine, batch), engine.optimizer_state()
    assert cached.hidden_BTD.dtype == BITS.get(form, np.float32)
    assert cached.hidden_BTD.shape == (4, 16, 64)
    assert engine.evaluate(cached).loss_sum == engine.evaluate(batch).loss_sum
    for found, expected in ((cached, batch), (pack(cached, ROWS), pack(batch, ROWS))):
        grads = []
        for each in (found, expected):
            engine.load_optimizer_state(fresh)
            grads.append(gradient(engine, each))
        assert_close(*grads, 3e-2 if form in BITS else 1e-5)


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize(
    ("targets", "below"),
    [(("lm_head",), 3), (("layers.2.mlp.up_proj", "lm_head"), 2), (("layers.1.mlp.up_proj", "layers.2.mlp.up_proj"), 1),
     (("layers.0.mlp.up_proj", "lm_head"), 0), (("all-linear",), 0)],
)  # fmt: skip
def test_the_layers_below_the_lowest_adapted_one(open_backend, tmp_path, backend, targets, below):
    model = write_tiny_llama(tmp_path / "llama", num_hidden_layers=3)
    spec = AdapterSpec(4, 6.0, 0.0, targets)
    engine = open_backend(backend).load(
        LoadRequest(model, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=4)
    )
    assert engine.description.layers_below_adapter == below
    batch = random_batch([9, 16], 96)
    if below:
        assert engine.evaluate(with_hidden_states(engine, batch)).loss_sum == engine.evaluate(batch).loss_sum


@pytest.mark.parametrize("backend", FORMS)
def test_a_module_outside_of_the_layers_leaves_nothing_below(open_backend, tmp_path, backend):
    """Such as a projection between embedding and first layer."""
    frozen_layers = importlib.import_module(f"dualtune_{backend}.host.hidden_states").FrozenLayers
    model = write_tiny_llama(tmp_path / "llama")
    spec = AdapterSpec(4, 6.0, 0.0, ("all-linear",))
    engine = open_backend(backend).load(
        LoadRequest(model, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=4)
    )
    body, adapted = engine.model.model, [layer for path, layer in engine._layers.items() if ".1." in path]
    assert len(frozen_layers(engine.model, adapted)) == 1
    assert len(frozen_layers(engine.model, [*adapted, body.embed_tokens])) == 0


def test_a_model_with_more_than_one_stream_of_hidden_states_is_refused(open_backend, tmp_path):
    """Gemma 3n predicts several of them, and gives each layer inputs of its own."""
    config = {
        "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "hidden_size": 32,
        "intermediate_size": [64] * 4, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 1, "laurel_rank": 4, "altup_num_inputs": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, backend = AdapterSpec(4, 6.0, 0.0, ("layers.2.mlp.up_proj",)), open_backend("torch")
    engine = backend.load(
        LoadRequest(tmp_path, "float32", "auto", "random", spec, OptimizerSpec(), seed=4, kernels="reference")
    )
    documents = in_memory([(np.arange(3, 3 + n, dtype=np.int32), np.ones(n, bool)) for n in (9, 12, 7)])
    with pytest.raises(ConfigError, match=r"Gemma3nForCausalLM.*: it has hidden states \[2, 3, 16, 32\] for tokens \["):
        try_on(engine, backend, documents, packs=False)


def test_other_hidden_states_are_another_loss(loaded):
    engine, _ = loaded
    batch = random_batch([9, 16, 5, 12], 96)
    cached = with_hidden_states(engine, batch)
    turned = replace(cached, hidden_BTD=cached.hidden_BTD[:, ::-1].copy())
    assert abs(engine.evaluate(turned).loss_sum - engine.evaluate(batch).loss_sum) > 1
