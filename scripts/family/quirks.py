"""What single families need besides small sizes: each entry changes the small config in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], object]


def _set(**values: Any) -> Change:
    return lambda config: config.update(values)


def _in(part: str, **values: Any) -> Change:
    return lambda config: config[part].update(values)


def _both(*changes: Change) -> Change:
    return lambda config: [change(config) for change in changes]


def _sections(*parts: str, rotary: int = 16) -> Change:
    """Set the shares of the rotary frequencies of text, height and width, which the class has for a large head."""
    half = rotary // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]

    def change(config: dict[str, Any]) -> None:
        for part in parts:
            config = config[part]
        config["rope_parameters"] = config["rope_parameters"] | {"mrope_section": sections}

    return change


HEAD_DIM = {"head_dim": 16}
INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
VISION_START = {"vision_start_token_id": 291}  # every published config has it, the class has no default
PAIRS = ["linear_attention", "hybrid"] * 2

GEMMA3N = {
    "num_hidden_layers": 10, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
    "num_kv_shared_layers": 5, "intermediate_size": [96] * 10,
    "activation_sparsity_pattern": [0.5, 0.5, *[0.0] * 8],
}  # fmt: skip
SHORT_CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
IMAGE_NAMES = {"<image>": 290, "<|extra_200|>": 291, "IMGIMGAZ": 292, "<|visual token 000000|>": 292}

QUIRKS: dict[str, Change] = {
    "axk1": _set(head_dim=8),
    "bailing_hybrid": _set(num_expert_group=2, topk_group=1, num_experts_per_token=2, layer_group_size=6),
    "blt": _both(
        _set(encoder_hash_byte_group_vocab=64),
        _in("encoder_config", vocab_size=320, hidden_size=64, num_attention_heads=4, num_key_value_heads=4),
        *(_in(part, hidden_size_global=64) for part in ("encoder_config", "decoder_config")),
    ),
    "chameleon": _set(vocabulary_map=IMAGE_NAMES),
    "cohere2": _set(sliding_window_pattern=4),
    "cohere_compass": _in("text_config", rope_parameters={"full_attention": ROPE}),
    "cohere_compass_text": _set(rope_parameters={"full_attention": ROPE}),
    "dbrx": _in("attn_config", rope_theta=10000.0, clip_qkv=8.0),
    "deepseek_ocr2": _in("text_config", mlp_layer_types=["dense", "sparse"], n_routed_experts=4, num_experts_per_tok=2),
    "deepseek_v2": _set(num_experts_per_tok=2, n_group=1, topk_group=1, head_dim=8),
    "diffusion_gemma": _in("text_config", num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "dots1": _set(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "dots3_note": _both(_in("text_config", head_dim=24), _in("vision_config", adapter_in_dim=32)),
    "dots3_note_text": _set(head_dim=24),
    "emu3": _set(vocabulary_map=IMAGE_NAMES),
    "ernie4_5_vl_moe": _in("text_config", rope_parameters=ROPE | {"mrope_section": [3, 3, 2]}),
    "fast_vlm": _in("vision_config", architecture="test_byobnet", model_args=None),
    "florence2": _in(
        "vision_config", depths=[1], patch_size=[7], patch_stride=[4], patch_padding=[3], patch_prenorm=[False],
        embed_dim=[32], num_heads=[4], num_groups=[4],
    ),
    "fun_asr_nano": _in("adaptor_config", intermediate_size=16),
    "gemma2": _set(sliding_window=64),  # mlx-lm has no windows for it, so that longer documents are refused
    "gemma3n": _both(_in("text_config", **GEMMA3N), _in("vision_config", architecture="test_byobnet")),
    "gemma3n_text": _set(**GEMMA3N),
    "glm46v": _sections("text_config"),
    "glm4v": _sections("text_config"),
    "glm4v_moe": _sections("text_config", rotary=8),
    "glm5_next": _in("text_config", index_topk=16, index_kpool=4),
    "glm_ocr": _sections("text_config"),
    "glmga": _sections("text_config"),
    "granite4_vision": _both(
        _set(downsample_rate="1/2", deepstack_layer_map=[[-1, 0]], spatial_target_layers=[1]),
        _in("vision_config", hidden_size=64),
        _in("qformer_config", hidden_size=64, encoder_hidden_size=64, num_attention_heads=1),
    ),
    "hunyuan_v1_dense": _set(**HEAD_DIM),
    "hunyuan_v1_moe": _set(**HEAD_DIM),
    "hunyuan_vl": _in("text_config", rope_parameters=ROPE | {"xdrope_section": [2, 2, 2, 2]}, **HEAD_DIM),
    "jamba": _set(attn_layer_offset=1, attn_layer_period=2),
    "gpt_neox": _set(intermediate_size=256),
    "lfm2": _set(full_attn_idxs=[1], **SHORT_CONV),
    "lfm2_moe": _set(**SHORT_CONV),
    "mimo_v2_flash": _set(head_dim=24),
    "olmo_hybrid": _set(linear_num_key_heads=4),
    "recurrent_gemma": _set(num_hidden_layers=3, num_key_value_heads=1),
    "llama4": _in("text_config", num_experts_per_tok=1),
    "llama4_text": _set(num_experts_per_tok=1),
    "mamba2": _set(num_heads=8),
    "ministral": _set(**HEAD_DIM),
    "molmo2": _in("adapter_config", vision_feature_layer=[-1, -2]),
    "nemotron": _set(num_key_value_heads=2, **HEAD_DIM),
    "perception_lm": _in("vision_config", architecture="test_vit", model_args={"embed_dim": 64}),
    "paddleocr_vl": _sections("text_config"),
    "inkling2": _in("text_config", unpadded_vocab_size=310),
    "inkling2_text": _set(unpadded_vocab_size=310),
    "qwen2_5_omni": _both(
        lambda config: _sections("text_config")(config["thinker_config"]), _in("thinker_config", **VISION_START),
        _set(enable_audio_output=False),  # else transformers reads voices from another file
    ),
    "qwen2_5_omni_thinker": _both(_sections("text_config"), _set(**VISION_START)),
    "qwen2_5_vl": _sections("text_config"),
    "qwen2_vl": _sections("text_config"),
    "qwen3_omni_moe": _both(
        _in("thinker_config", **VISION_START),
        _in("talker_config", spatial_merge_size=2),
        lambda config: config["talker_config"]["text_config"].update(shared_expert_intermediate_size=32),
    ),
    "qwen3_omni_moe_thinker": _set(**VISION_START),
    "qwen4_exp": _in("text_config", **INDEXER),
    "qwen4_exp_text": _set(**INDEXER),
    "reformer": _set(is_decoder=True, axial_pos_embds=False),
    "step3p7": _in("text_config", sliding_window=16),
    "xmod": _set(default_language="en_XX"),
    "youtu": _set(head_dim=8),
    "zamba": _set(layers_block_type=PAIRS, num_hidden_layers=4, attention_hidden_size=128, attention_head_dim=32),
    "zamba2": _set(
        layers_block_type=PAIRS, num_hidden_layers=4, hybrid_layer_ids=[1, 3], attention_hidden_size=128,
        attention_head_dim=32, kv_channels=16, num_key_value_heads=4,
    ),
    "zaya": _set(num_experts_per_tok=1),
}  # fmt: skip
