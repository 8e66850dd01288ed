"""Activation checkpointing on MLX: the same gradient bit for bit, in less memory, with every fast piece."""

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.engine.backend import LoadRequest
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_gpt2, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

mx = pytest.importorskip("mlx.core")
attention = importlib.import_module("dualtune_mlx.kernels.attention")
card = importlib.import_module("dualtune_mlx.card")
checkpointing = importlib.import_module("dualtune_mlx.checkpointing")

FULL, REMADE = ActivationCheckpointing("all"), ActivationCheckpointing(adapter_inputs=True)
PAIRS, TWO = ActivationCheckpointing("all", every=2), ActivationCheckpointing(2)
SPEC = AdapterSpec(4, 6.0, 0.3, ("all-linear",))
DOCUMENTS = random_batch([9, 16, 5, 12], 96)
PACKED = pack(DOCUMENTS, [[2, 0, 3], [1]], pad=2)
OTHER = replace(PACKED, dropout_seeds_BT=PACKED.dropout_seeds_BT + 1)  # of the same shape
GEMMA4 = {
    "model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64, "head_dim": 8,
    "num_attention_heads": 4, "global_head_dim": 8, "vocab_size": 96, "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "sliding_window_pattern": 2,
}  # fmt: skip
IQUEST = {
    "model_type": "iquestloopcoder", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-5, "loop_num": 2,
}  # fmt: skip


@pytest.fixture
def load(open_backend, tmp_path):
    """An engine with a tiny Llama of four layers, or with another model that was written."""

    def load_(model_dir=None, **changes):
        model_dir = model_dir or write_tiny_llama(tmp_path / "model", num_hidden_layers=4)
        request = LoadRequest(model_dir, "float32", "none", "pretrained", SPEC, OptimizerSpec(), seed=4)
        engine = open_backend("mlx").load(replace(request, **changes))
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


def learned(engine, how, *batches):
    """(gradient, loss) of accumulated micro-batches."""
    engine.set_checkpointing(how)
    engine._grads, engine._loss = mx.zeros_like(engine._params), mx.array(0.0)
    for batch in batches:
        engine.forward_backward(batch, divisor=7.0)
    return np.array(engine._grads), engine._loss.item()


def assert_same_bits(engine, *dial, batches=(DOCUMENTS, PACKED)):
    expected, loss = learned(engine, KEEP_ALL, *batches)
    assert np.isfinite(loss) and all(g.any() for g in engine._layout.named(mx.array(expected)).values())
    for how in dial:
        found, found_loss = learned(engine, how, *batches)
        assert np.array_equal(found, expected) and found_loss == loss, how


# --- the same gradient ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_recomputed_gradient_has_the_same_bits(kernels, dtype, load):
    """With dropout, padded and packed, in two micro-batches."""
    assert_same_bits(load(kernels=kernels, dtype=dtype), FULL, PAIRS, TWO, REMADE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compiled_one_has_the_bits_of_a_compiled_one(dtype, load):
    assert_same_bits(load(kernels="fused", dtype=dtype), FULL, PAIRS, REMADE, batches=(PACKED, OTHER))


def test_so_has_one_of_attention_in_chunks(load, monkeypatch):
    """Which are recomputed within what is recomputed."""
    chunked = attention.chunked
    monkeypatch.setattr(attention, "chunked", lambda *args: chunked(*args, chunk=5))
    assert_same_bits(load(), FULL, REMADE)


def test_so_has_one_of_gpt2(load, tmp_path):
    assert_same_bits(load(write_tiny_gpt2(tmp_path / "gpt2", n_layer=3)), FULL, PAIRS, REMADE)


def test_so_has_one_of_a_quantized_base(load):
    spec = replace(SPEC, scaling="rank_stabilized", dropout=0.0)
    assert_same_bits(load(quantization="affine4", adapter=spec), FULL, REMADE)


@pytest.mark.parametrize("targets", [("layers.1.self_attn.q_proj", "layers.3.mlp.up_proj"), ("lm_head",)])
def test_layers_without_adapter_are_recomputed_too(targets, load):
    assert_same_bits(load(adapter=replace(SPEC, targets=targets)), FULL, PAIRS, ActivationCheckpointing(4), REMADE)


# --- what is recomputed, and when -------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch):
    """The functions that are recomputed, one entry for each segment that ran forward."""
    found, recomputed = [], checkpointing.recomputed
    monkeypatch.setattr(checkpointing, "recomputed", lambda *args: found.append(args) or recomputed(*args))
    return found


def test_only_learning_recomputes(load, runs):
    engine = load(checkpointing=ActivationCheckpointing(3, every=2))
    runs.clear()  # of the test of the model
    engine.forward_backward(DOCUMENTS, divisor=1.0)
    assert len(runs) == 2
    engine.evaluate(DOCUMENTS), engine.logprobs(DOCUMENTS), engine.target_logprobs(DOCUMENTS, dropout=True)
    list(zip(range(2), engine.generate(DOCUMENTS.tokens_BT[0, :4], choose=lambda logits: 5), strict=False))
    assert len(runs) == 2


@pytest.mark.parametrize("kernels", ["auto", "fused"])
def test_a_change_holds_from_the_next_micro_batch_on(kernels, load, runs):
    engine = load(kernels=kernels)
    assert engine.description.checkpointing == "none"
    for how, segments, said in (
        (FULL, 3, "3 of 4 layers are recomputed"),
        (ActivationCheckpointing(2, reason="as few as fit"), 2, "2 of 4 layers are recomputed"),
        (REMADE, 0, "the adapters' inputs are recomputed"),
        (KEEP_ALL, 0, "none"),
    ):
        engine.set_checkpointing(how)
        runs.clear()
        engine.forward_backward(PACKED, divisor=1.0)
        assert len(runs) == segments
        assert (engine.description.checkpointing, engine.description.checkpointing_reason) == (said, how.reason)


def test_recomputing_is_not_silently_off(load, tmp_path):
    """Each value has to hold its own share of MLX's peak; the numbers are those of this shape, rounded up."""
    wide = write_tiny_llama(tmp_path / "wide", num_hidden_layers=8)
    engine, (batch,) = load(wide), [random_batch([96] * 2, 96)]

    def peak(how):
        learned(engine, how, batch)
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        learned(engine, how, batch)
        mx.synchronize()
        return mx.get_peak_memory() - before

    none = peak(KEEP_ALL)
    shares = [peak(how) / none for how in (FULL, ActivationCheckpointing(4), REMADE)]
    assert all(share < most for share, most in zip(shares, (0.3, 0.65, 0.85), strict=True)), shares


@pytest.mark.parametrize("how", [FULL, PAIRS, REMADE], ids=["full", "pairs", "remade"])
@pytest.mark.parametrize(("owner", "name"), [(attention, "by_document"), (mx, "vjp")], ids=["forward", "backward"])
def test_an_exception_leaves_nothing_behind(how, owner, name, load, monkeypatch):
    """Neither waiting layers, nor a dropout mask, nor arrays of the function that was differentiated."""
    engine, other = load(), load()
    expected = learned(other, how, PACKED)[0], other.evaluate(PACKED).loss_sum
    engine.set_checkpointing(how)
    calls, plain = [], getattr(owner, name)

    def fails(*args, **options):
        """The second time."""
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return plain(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fails)
        with pytest.raises(MemoryError):
            engine.forward_backward(PACKED, divisor=7.0)
    assert not any(layer.segment for layer in engine.model.layers) and engine._dropout_seeds.seeds_BT is None
    assert not any(segment._waiting for segment in engine._recomputation._segments)
    assert engine._recomputation._origins._known is None
    shared = [layer.shared._products for layer in engine._layers.values()]
    assert shared and not any(products.waiting or products.x is not None for products in shared)
    bound = engine._layout.named(engine._params)
    assert all(mx.array_equal(array, bound[name]) for name, array in engine._adapter.bound.items())
    assert engine.evaluate(PACKED).loss_sum == expected[1]
    assert np.array_equal(learned(engine, how, PACKED)[0], expected[0])


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_more_layers_than_there_are_are_refused(load, runs):
    message = "got 5 layers, but the model has 4; allowed: 1 to 4, or full"
    with pytest.raises(ConfigError, match=message):
        load(checkpointing=ActivationCheckpointing(5))
    engine = load(checkpointing=TWO)
    with pytest.raises(ConfigError, match=message):
        engine.set_checkpointing(ActivationCheckpointing(5))
    runs.clear()
    engine.forward_backward(PACKED, divisor=1.0)
    assert len(runs) == 2 and engine.description.checkpointing == "2 of 4 layers are recomputed"


@pytest.mark.parametrize(("config", "how"), [(GEMMA4, FULL), (GEMMA4, PAIRS), (IQUEST, FULL)])
def test_layers_that_are_no_functions_of_the_hidden_states_are_refused(config, how, load, tmp_path, runs):
    """Adapters' inputs can be made again.

    In Gemma 4 the last layers take keys and values of earlier ones; IQuest-LoopCoder calls the parts of its layers.
    """
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = load(tmp_path, init="random", adapter=replace(SPEC, targets=("q_proj",)))
    before = learned(engine, KEEP_ALL, DOCUMENTS)[0]
    with pytest.raises(ConfigError, match=rf"mlx_lm.models.{config['model_type']}\).*allowed: none, adapter_inputs"):
        engine.set_checkpointing(how)
    assert engine.description.checkpointing == "none"
    assert_same_bits(engine, REMADE, batches=[DOCUMENTS])
    assert np.array_equal(learned(engine, KEEP_ALL, DOCUMENTS)[0], before)


@pytest.mark.parametrize("value", ["auto", "none", "adapter_inputs", "full", "{layers: 2, every: 2}"])
def test_every_value_is_honoured(value):
    text = f"model: {{name: m}}\ndata: {{train: t.jsonl}}\nmemory: {{checkpointing: {value}}}\n"
    check_capabilities(card.CARD, parse_config(text))
