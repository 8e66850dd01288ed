"""Which fast pieces a model gets on MLX, what the description says of it, and what stays as it was."""

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

mx = pytest.importorskip("mlx.core")
base = pytest.importorskip("mlx_lm.models.base")
llama = pytest.importorskip("mlx_lm.models.llama")
mlx_utils = pytest.importorskip("mlx_lm.utils")
attention = importlib.import_module("dualtune_mlx.kernels.attention")

SPEC = AdapterSpec(4, 6.0, 0.1, ("q_proj", "v_proj"))
DOCUMENTS = random_batch([9, 16, 5, 12], 96)
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
CAPPED = SHAPE | {"model_type": "gemma2", "query_pre_attn_scalar": 8}
SCALED = SHAPE | {
    "model_type": "granite", "logits_scaling": 4.0, "attention_multiplier": 0.35, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def load(open_backend, tmp_path):
    def load_(config=None, *, kernels="auto", targets=SPEC.targets):
        model_dir, init = tmp_path / "model", "random"
        if config is None:
            model_dir, init = write_tiny_llama(model_dir), "pretrained"
        else:
            model_dir.mkdir(exist_ok=True)
            (model_dir / "config.json").write_text(json.dumps(config))
        spec = replace(SPEC, targets=targets)
        request = LoadRequest(model_dir, "float32", "auto", init, spec, OptimizerSpec(), seed=4, kernels=kernels)
        engine = open_backend("mlx").load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


def kernels_of(engine):
    return engine.description.kernels.split("; ")


def test_a_llama_gets_every_piece(load):
    assert kernels_of(load()) == ["fused: lora, loss, attention", "nothing is compiled: no faster on a CPU"]
    assert kernels_of(load(kernels="fused")) == ["fused: lora, loss, attention, compiled step"]
    assert kernels_of(load(kernels="reference")) == ["reference"]


@pytest.mark.parametrize(
    ("config", "targets", "plain"),
    [
        (CAPPED, SPEC.targets, ["loss", "attention"]),  # also the scores are capped, by its own code
        (SCALED, SPEC.targets, ["loss"]),
        (None, ("q_proj", "lm_head"), ["loss"]),
    ],
    ids=["capped logits", "scaled logits", "an adapted head"],
)
def test_what_the_fast_pieces_do_not_cover_stays_plain_and_is_named(config, targets, plain, load):
    engine = load(config, targets=targets)
    fused, *reasons = kernels_of(engine)
    assert [reason.split()[0] for reason in reasons] == [*plain, "nothing"]
    assert not [piece for piece in plain if piece in fused]
    found, expected = (gradient(e, DOCUMENTS) for e in (engine, load(config, targets=targets, kernels="reference")))
    assert_close(found, expected, 1e-5)
    with pytest.raises(ConfigError, match=r"^model\.kernels: got fused, but .*loss plain: .*Set auto"):
        load(config, targets=targets, kernels="fused")


def test_a_machine_without_compiler_trains_uncompiled(load, monkeypatch):
    monkeypatch.setenv("PATH", "")
    engine = load()
    before = engine.evaluate(DOCUMENTS).loss_sum
    gradient(engine, DOCUMENTS)
    assert engine.evaluate(DOCUMENTS).loss_sum == pytest.approx(before)
    with pytest.raises(ConfigError, match=r"nothing is compiled: MLX needs g\+\+"):
        load(kernels="fused")


def test_other_models_of_the_process_attend_as_before(load, tmp_path):
    code = llama.Attention.__call__
    raw = mlx_utils.load_model(write_tiny_llama(tmp_path / "raw"))[0]
    engine = load()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert llama.Attention.__call__ is code and type(raw.layers[0].self_attn) is llama.Attention
    own = engine.model.layers[0].self_attn
    assert isinstance(own, llama.Attention) and type(own) is not llama.Attention


def test_attention_is_by_document_while_learning_and_evaluating_alone(load, monkeypatch):
    """Each layer of both verbs, of packed rows and padded ones; log-probabilities are for verification, so plain."""
    calls = []
    by_document = attention.by_document
    monkeypatch.setattr(attention, "by_document", lambda *args: calls.append(args[-1]) or by_document(*args))
    engine = load()
    for batch in (DOCUMENTS, pack(DOCUMENTS, [[2, 0, 3], [1]])):
        engine.evaluate(batch)
        engine.forward_backward(batch, divisor=batch.num_targets)
        assert len(calls) == 4 and all(sum(piece.is_document for piece in pieces) == 4 for pieces in calls)
        calls.clear()
        engine.logprobs(batch)
        list(zip(range(2), engine.generate(batch.tokens_BT[0, :4], choose=lambda logits: 5), strict=False))
        assert not calls


@pytest.mark.parametrize("kernels", ["auto", "fused"])
def test_an_evaluation_between_micro_batches_changes_nothing(kernels, load):
    """What was traced for the gradient must not be left in the layers."""
    found, expected = load(kernels=kernels), load(kernels=kernels)
    for engine in (found, expected):
        engine.forward_backward(DOCUMENTS, divisor=DOCUMENTS.num_targets)
        if engine is found:
            assert np.isfinite(engine.evaluate(DOCUMENTS).loss_sum) and np.isfinite(engine.logprobs(DOCUMENTS)).all()
    assert_close(gradient(found, DOCUMENTS), gradient(expected, DOCUMENTS), 1e-12)
