"""Packing on torch: transformers masks by the positions, and the models that it does not do it for."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, row_of, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.model_checks import check_packing

pytestmark = pytest.mark.covering(2)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("q_proj", "o_proj", "down_proj"))
DOCUMENTS = random_batch([9, 16, 5, 12], 96)
ROWS = [[2, 0, 3], [1]]
SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
GATED_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WITH_STATE = {
    "gated delta rule": lambda: transformers.Qwen3NextConfig(
        **GATED_DELTA, **EXPERTS, shared_expert_intermediate_size=16, **SHAPE, **GROUPED
    ),
    "convolutions": lambda: transformers.Lfm2Config(
        layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, **SHAPE, **GROUPED
    ),
    "mamba": lambda: transformers.MambaConfig(state_size=8, **SHAPE),
    "mamba 2": lambda: transformers.Mamba2Config(
        state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8, expand=2, **SHAPE
    ),
    "attention and mamba 2 in a layer": lambda: transformers.FalconH1Config(
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_d_state=8,
        mamba_chunk_size=8,
        head_dim=8,
        **SHAPE,
        **GROUPED,
    ),
    "recurrent gates": lambda: transformers.RecurrentGemmaConfig(
        lru_width=32, attention_window_size=64, block_types=["recurrent", "attention"], head_dim=8, **SHAPE, **GROUPED
    ),
}
REFUSED = {
    "no positions at all": lambda: transformers.BloomConfig(**SHAPE),
}


@pytest.fixture
def load(open_backend, tmp_path):
    backend = open_backend("torch")

    def load_(model=None, *, spec=SPEC, kernels="auto", **changes):
        """An engine of a config of transformers, with random weights; of a tiny Llama where there is none."""
        path = tmp_path / "model"
        if model is None:
            write_tiny_llama(path, **changes)
        else:
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(model).save_pretrained(path)
        engine = backend.load(
            LoadRequest(path, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=4, kernels=kernels)
        )
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


def assert_packed_is_separate(engine):
    """Every log-probability, with none that is not a number in the padding either; and the gradient."""
    packed = pack(DOCUMENTS, ROWS)
    together = engine.logprobs(packed)
    assert np.isfinite(together).all() and (packed.segments_BT == 0).any()
    for b, row in enumerate(ROWS):
        for number, document in enumerate(row, start=1):
            alone = engine.logprobs(row_of(DOCUMENTS, document))[0][DOCUMENTS.segments_BT[document] > 0]
            assert np.abs(together[b][packed.segments_BT[b] == number] - alone).max() <= tolerances.LOGPROBS
    assert_close(slope(engine, packed), slope(engine, DOCUMENTS), tolerances.GRADIENT)


def slope(engine, batch):
    engine.model.zero_grad(set_to_none=False)
    engine.forward_backward(batch, divisor=batch.num_targets)
    return {name: p.grad.numpy() for name, p in engine.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("attention", ["dualtune", "sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 8], ids=["all", "window"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_packed_document_sees_only_itself(attention, window, training, load):
    kernels = "auto" if attention == "dualtune" else "reference"
    engine = load(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window, kernels=kernels)
    if kernels == "reference":
        engine.model.set_attn_implementation(attention)
    assert engine.model.config._attn_implementation == attention
    engine.model.train(training)
    assert_packed_is_separate(engine)


@pytest.mark.parametrize("kind", ["GPT2Config", "GPTBigCodeConfig"])
def test_absolute_positions_begin_anew_in_each_document(kind, load):
    config = getattr(transformers, kind)(n_positions=17, **SHAPE)  # enough for the check; rows have 26 tokens
    engine = load(config, spec=replace(SPEC, targets=("c_attn", "c_proj")))
    check_packing(engine)
    assert_packed_is_separate(engine)


def test_one_document_a_row_is_computed_without_a_mask(load, monkeypatch):
    engine, calls = load(kernels="reference"), []
    engine.evaluate(pack(DOCUMENTS, ROWS))  # tries once whether the model needs masks
    forward = engine.model.forward
    monkeypatch.setattr(
        engine.model, "forward", lambda *args, **kwargs: calls.append(kwargs) or forward(*args, **kwargs)
    )
    for batch in (DOCUMENTS, pack(DOCUMENTS, ROWS)):
        engine.evaluate(batch)
    assert [sorted(call) for call in calls] == [["use_cache"], ["position_ids", "use_cache"]]


@pytest.mark.parametrize("kind", WITH_STATE)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_state_begins_anew_in_each_document(kind, kernels, load):
    """Adapters, dropout and recomputed layers included: the layers of a document see it alone."""
    config = WITH_STATE[kind]()
    targets = ("in_proj", "out_proj") if kind == "mamba" else ("all-linear",)
    engine = load(config, spec=replace(SPEC, targets=targets, dropout=0.25), kernels=kernels)
    check_packing(engine)
    assert_packed_is_separate(engine)
    engine.set_checkpointing(ActivationCheckpointing(2))
    assert_packed_is_separate(engine)


@pytest.mark.parametrize("window", [8, 64])
def test_a_model_that_hides_positions_from_its_masks_is_given_them(window, load):
    """gpt-oss: attention sinks are beyond our kernel, and its class makes masks without positions."""
    config = transformers.GptOssConfig(
        num_local_experts=4, num_experts_per_tok=2, sliding_window=window, head_dim=8, **SHAPE, **GROUPED
    )
    engine = load(config, spec=replace(SPEC, targets=("q_proj", "o_proj"), dropout=0.25))
    check_packing(engine)
    assert_packed_is_separate(engine)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused_by_name(kind, load):
    config = REFUSED[kind]()
    engine = load(config, spec=replace(SPEC, targets=()))
    with pytest.raises(ConfigError) as caught:
        check_packing(engine)
    message = str(caught.value)
    assert message.startswith(f"data.packing: this model ({engine.description.model_class}) computes another loss")
    assert message.endswith("; set data.packing: false")
