"""Packing on MLX: rotary embeddings that take a position for each token, and the models that cannot be packed."""

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, row_of, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.model_checks import check_packing

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
tree_flatten = pytest.importorskip("mlx.utils").tree_flatten
rope_utils = pytest.importorskip("mlx_lm.models.rope_utils")
mlx_utils = pytest.importorskip("mlx_lm.utils")
make_prompt_cache = pytest.importorskip("mlx_lm.models.cache").make_prompt_cache
packing = importlib.import_module("dualtune_mlx.packing")

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("all-linear",))
DOCUMENTS = random_batch([9, 16, 5, 12], 96)
ROWS = [[2, 0, 3], [1]]
SCALINGS = {
    "default": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    },
}  # fmt: skip
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
WITH_STATE = {
    "convolutions": SHAPE | {
        "model_type": "lfm2", "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 32,
        "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "a state": {
        "model_type": "mamba", "hidden_size": 32, "intermediate_size": 64, "state_size": 8, "num_hidden_layers": 2,
        "vocab_size": 96, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 2,
    },
    "gated delta rule": SHAPE | {
        "model_type": "qwen3_next", "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [], "moe_intermediate_size": 16, "partial_rotary_factor": 0.5, "attention_bias": False,
    },
    "mamba 2": {
        "model_type": "mamba2", "num_heads": 8, "head_dim": 8, "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 64, "state_size": 8, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5, "conv_kernel": 4,
        "n_groups": 2, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0], "time_step_rank": 2,
    },
}  # fmt: skip
REFUSED = {
    "absolute positions": {
        "model_type": "gpt_bigcode", "n_inner": 128, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
        "layer_norm_epsilon": 1e-5, "vocab_size": 96,
    },
    "rows that see each other's masks": SHAPE | {"model_type": "gemma2", "query_pre_attn_scalar": 8},
    "positions that depend on the length": SHAPE | {
        "model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
}  # fmt: skip


@pytest.fixture
def load(open_backend):
    backend = open_backend("mlx")

    def load_(model_dir, init="pretrained", dropout=0.0, kernels="auto"):
        spec = replace(SPEC, dropout=dropout)
        return backend.load(
            LoadRequest(model_dir, "float32", "auto", init, spec, OptimizerSpec(), seed=4, kernels=kernels)
        )

    return load_


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("dims", [16, 8], ids=["whole", "partial"])
def test_each_token_is_rotated_by_its_own_position(kind, traditional, dims):
    """Values and gradients are those of mlx-lm's own module, called for one token at a time."""
    scaling = SCALINGS[kind] and SCALINGS[kind] | {"long_factor": [3.0] * (dims // 2)}
    own, per_token = (rope_utils.initialize_rope(dims, 1e4, traditional, scaling, 64) for _ in range(2))
    packing.accept_positions(per_token)
    rng = np.random.default_rng(0)
    positions = np.array([[0, 1, 2, 0, 1], [0, 0, 1, 30, 0]])
    x, weights = (mx.array(rng.normal(size=(2, 3, 5, 16)).astype(np.float32)) for _ in range(2))

    def one_at_a_time(x):
        rows = [[own(x[b : b + 1, :, t : t + 1], offset=int(positions[b, t])) for t in range(5)] for b in range(2)]
        return mx.concatenate([mx.concatenate(row, axis=2) for row in rows])

    def together(x):
        return per_token(x, offset=mx.array(positions))

    found, expected = (np.array(rotate(x)) for rotate in (together, one_at_a_time))
    assert np.abs(found - expected).max() <= 1e-6
    assert np.abs(found - np.array(own(x))).max() > 1e-2
    slopes = [np.array(mx.grad(lambda x, r=rotate: (weights * r(x)).sum())(x)) for rotate in (together, one_at_a_time)]
    assert np.abs(slopes[0] - slopes[1]).max() <= 1e-6


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_packed_document_computes_what_it_does_alone(kind, load, tmp_path):
    engine = load(write_tiny_llama(tmp_path / "model", rope_scaling=SCALINGS[kind]))
    packed = pack(DOCUMENTS, ROWS)
    together = engine.logprobs(packed)
    for b, row in enumerate(ROWS):
        for number, document in enumerate(row, start=1):
            alone = engine.logprobs(row_of(DOCUMENTS, document))[0][DOCUMENTS.segments_BT[document] > 0]
            assert np.abs(together[b][packed.segments_BT[b] == number] - alone).max() <= tolerances.LOGPROBS


def test_taking_positions_changes_nothing_else(load, tmp_path):
    """Paths, types, parameters, and generation with mlx-lm's own cache, bit for bit."""
    path = write_tiny_llama(tmp_path / "model", rope_scaling=SCALINGS["llama3"])
    raw = mlx_utils.load_model(path)[0]
    model = mlx_utils.load_model(path)[0]
    packing.accept_positions(model)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in raw.named_modules()]
    assert [name for name, _ in tree_flatten(model.parameters())] == [n for n, _ in tree_flatten(raw.parameters())]
    rope = model.layers[0].self_attn.rope
    assert isinstance(rope, packing.PerTokenRotary) and isinstance(rope, rope_utils.Llama3RoPE)
    engine, tokens = load(path), DOCUMENTS.tokens_BT[0].tolist()
    cache, seen = make_prompt_cache(raw), []

    def choose(logits):
        """The next token of the document, after the first six."""
        expected = raw(mx.array([tokens[len(seen) + 5 : len(seen) + 6] if seen else tokens[:6]]), cache=cache)
        seen.append(np.array_equal(logits, np.array(expected[0, -1])))
        return tokens[len(seen) + 5] if len(seen) < 4 else None

    list(engine.generate(np.array(tokens[:6], np.int32), choose=choose))
    assert seen == [True] * 4


def test_a_mask_is_built_once_for_a_micro_batch(load, tmp_path):
    engine, batch = load(write_tiny_llama(tmp_path / "model")), pack(DOCUMENTS, ROWS)
    layers = packing.packed_cache(engine.model, mx.array(batch.segments_BT), mx.array(batch.positions_BT))
    assert len(layers) == 2 and layers[0] is layers[1]
    mask, window = layers[0].make_mask(26), layers[0].make_mask(26, window_size=8)
    assert layers[0].make_mask(26, return_array=True) is mask and layers[0].make_mask(26, window_size=8) is window
    # Fourteen tokens are before the last document, of twelve; its last token sees all of it, or eight.
    assert np.array(mask)[0, 0, -1].nonzero()[0].tolist() == list(range(14, 26))
    assert np.array(window)[0, 0, -1].nonzero()[0].tolist() == list(range(18, 26))


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused_by_name(kind, load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(REFUSED[kind]))
    engine = load(tmp_path, init="random")
    with pytest.raises(ConfigError) as caught:
        check_packing(engine)
    message = str(caught.value)
    assert message.startswith(f"data.packing: this model ({REFUSED[kind]['model_type']}.Model) ")
    assert message.endswith("; set data.packing: false") and "\n" not in message


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_state_begins_anew_in_each_document(kind, load, tmp_path):
    """Every log-probability, and the gradient with dropout and recomputed layers."""
    (tmp_path / "config.json").write_text(json.dumps(WITH_STATE[kind]))
    dropout = 0.0 if WITH_STATE[kind]["model_type"] == "mamba" else 0.25
    engine, packed = load(tmp_path, init="random", dropout=dropout), pack(DOCUMENTS, ROWS)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    check_packing(engine)
    together = engine.logprobs(packed)
    for b, row in enumerate(ROWS):
        for number, document in enumerate(row, start=1):
            alone = engine.logprobs(row_of(DOCUMENTS, document))[0][DOCUMENTS.segments_BT[document] > 0]
            assert np.abs(together[b][packed.segments_BT[b] == number] - alone).max() <= tolerances.LOGPROBS
    for checkpointing in (KEEP_ALL, ActivationCheckpointing(2)):
        engine.set_checkpointing(checkpointing)
        slopes = [engine.traced(batch, divisor=42)[0] for batch in (packed, DOCUMENTS)]
        expected = np.array(slopes[1])
        assert np.abs(np.array(slopes[0]) - expected).max() <= tolerances.GRADIENT * np.abs(expected).max()


def test_dropout_of_a_layer_that_gets_one_token_at_a_time_is_refused(load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WITH_STATE["a state"]))
    load(tmp_path, init="random", dropout=0.25).traced(DOCUMENTS, divisor=42)  # a scan in chunks gives it whole rows
    engine = load(tmp_path, init="random", dropout=0.25, kernels="reference")
    with pytest.raises(ConfigError, match=r"adapter\.dropout: .* with 4 of the 64 tokens .* Set adapter\.dropout: 0"):
        engine.traced(DOCUMENTS, divisor=42)


def test_models_with_windows_are_packed(load, tmp_path):
    """Gemma 3, GPT-OSS and OLMo 3 as mlx-lm has them, with a window shorter than the documents of the check."""
    types = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    extra = {
        "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "olmo3": {},
    }
    for name, keys in extra.items():
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | types | keys | {"model_type": name}))
        check_packing(load(tmp_path, init="random"))
