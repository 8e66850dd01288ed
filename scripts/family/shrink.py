"""A family's default config made tiny, by the names of its keys.

Sizes come from two tables, one for the part that reads text and one for towers (vision, audio). Lists with an entry for
each layer keep one entry of each kind, so that a hybrid stays a hybrid. Families that need more have a line in QUIRKS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

VOCAB, WINDOW, POSITIONS = 320, 16, 512
FIRST_MEDIA_TOKEN = 290  # image and audio tokens come after those of the tokenizer
MAX_PREFIX = 9  # layers, up to which a pattern of layers is kept as it is

TEXT = {
    "hidden_size d_model n_embd dim embed_dim embedding_dim embedding_size word_embed_proj_dim lru_width emb_dim": 64,
    "input_embedding_size output_embedding_size text_hidden_size backbone_hidden_size thinker_hidden_size": 64,
    "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size inner_dim decoder_ffn_dim encoder_ffn_dim d_inner": 96,
    "dim_ff feed_forward_size dff block_ff_dim mlp_dim shared_expert_intermediate_size": 96,
    "moe_intermediate_size shared_intermediate_size moe_ffn_hidden_size expert_ffn_hidden_size share_expert_dim": 32,
    "moe_shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size moe_hidden_size": 32,
    "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads": 4,
    "num_sliding_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads": 4,
    "num_key_value_heads n_head_kv num_kv_heads num_query_groups swa_num_key_value_heads num_global_key_value_heads": 2,
    "head_dim kv_channels d_kv d_head attention_head_size swa_head_dim kv_head_dim mamba_head_dim mamba_d_head": 16,
    "mamba_headdim attention_head_dim swa_v_head_dim v_head_dim linear_key_head_dim linear_value_head_dim": 16,
    "global_head_dim": 32,
    "vocab_size vocab_size_per_layer_input n_tokens decoder_vocab_size": VOCAB,
    "max_position_embeddings n_positions max_seq_len max_sequence_length context_length n_ctx seq_length": POSITIONS,
    "max_target_positions model_max_length": POSITIONS,
    "sliding_window attention_window_size local_attention attention_chunk_size window_size": WINDOW,
    "original_max_position_embeddings": POSITIONS // 2,
    "n_routed_experts num_experts num_local_experts moe_num_experts num_routed_experts ffn_num_experts": 4,
    "num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token moe_top_k top_k_expert": 2,
    "n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts moe_num_shared_experts": 1,
    "moe_layer_start_index zero_expert_num num_dense_layers": 1,
    "kv_lora_rank q_lora_rank o_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "qk_head_dim": 24, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 8, "rotary_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_attention_heads linear_num_heads": 4,
    "mamba_num_heads mamba_n_heads n_mamba_heads": 8, "ssm_state_size mamba_d_state state_size": 16,
    "mamba_d_ssm": 128, "chunk_size mamba_chunk_size linear_chunk_size": 8, "n_groups mamba_n_groups mamba_ngroups": 1,
    "time_step_rank mamba_dt_rank": 4, "block_size": 8,
    "hidden_size_per_layer_input": 16, "query_pre_attn_scalar": 16, "laurel_rank": 8,
    "cross_attention_hidden_size": 64, "router_hidden_size": 32, "adapter_rank": 8,
}  # fmt: skip

TOWER = {
    "hidden_size d_model embed_dim width mm_hidden_size dim hidden_dim": 32,
    "intermediate_size ffn_dim encoder_ffn_dim mlp_dim decoder_ffn_dim": 48,
    "num_attention_heads num_heads encoder_attention_heads attention_heads decoder_attention_heads n_head": 2,
    "num_key_value_heads": 2, "head_dim": 16, "projector_dim": 32,
    "num_hidden_layers depth num_layers encoder_layers n_layer decoder_layers conf_num_hidden_layers": 2,
    "encoder_hidden_size": 32, "num_global_layers": 1, "vocab_size": 64, "max_position_embeddings": 64,
    "num_position_embeddings": 16, "num_query_tokens query_length num_queries": 4, "max_source_positions": 64,
    "num_mel_bins": 16, "output_dim out_hidden_size output_hidden_size": 64, "conf_num_attention_heads": 2,
    "projection_dim": 32, "codebook_size": 32, "n_window": 8, "num_filters": 4,
}  # fmt: skip

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_decoder_layers")
TOWER_NAMES = re.compile(r"vision|audio|speech|vq|qformer|perceiver|tokenizer|codec|encoder|depth|talker|token2wav|dac")
MEDIA_TOKEN = re.compile(r"(image|video|audio|vision|boi|eoi|img|frame|media|speech|eoa|boa|patch|im_|tts|codec|wrap).*"
                         r"(token_(id|index)|_id|index|start|end)$")  # fmt: skip
DROPOUT = re.compile(r"drop(out)?($|_)|_pdrop$|layerdrop|jitter_noise")
WIDTH = re.compile(r"(dim|size|width|channels|rank|hidden|inner)$")
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}


def _table(rows: Mapping[str, int]) -> dict[str, int]:
    return {name: size for names, size in rows.items() for name in names.split()}


SIZES = {False: _table(TEXT), True: _table(TOWER)}


def shrink(config: Mapping[str, Any], *, tower: bool = False) -> dict[str, Any]:
    """Return the values of a config (from `to_dict`) that make a tiny model of the same structure."""
    small = {name: _small(name, value, config, tower) for name, value in config.items()}
    small |= _layers(config, small)
    return small | _rope(small)


def _small(name: str, value: Any, config: Mapping[str, Any], tower: bool) -> Any:
    """Return one value made small. Keys of unknown names stay as they are unless they are a large width."""
    if isinstance(value, dict) and "model_type" in value:
        return shrink(value, tower=tower or bool(TOWER_NAMES.search(name)))
    if DROPOUT.search(name) and isinstance(value, float):
        return 0.0
    if name in IDS:
        return IDS[name]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if MEDIA_TOKEN.search(name):
        return FIRST_MEDIA_TOKEN + sum(map(ord, name)) % (VOCAB - FIRST_MEDIA_TOKEN)
    if name == "first_k_dense_replace" and "mlp_layer_types" in config:
        return value  # the list says it again
    if name == "head_dim" and value == config.get("qk_rope_head_dim"):
        return SIZES[False]["qk_rope_head_dim"]  # of families where only that part of a head is rotated
    if name == "sliding_window" and len(set(config.get("layer_types") or ())) < 2:
        return 4 * WINDOW  # longer than a document: MLX refuses those that a window of all layers would cut
    if name == "num_experts_per_tok":
        return min(value, 2)
    if name in SIZES[tower]:
        return _heads_alike(name, config, tower) or (SIZES[tower][name] if value > 0 else value)
    if name in {"image_size", "patch_size"}:
        return {"image_size": 16, "patch_size": 4}[name]
    return 64 if WIDTH.search(name) and value > 64 else value


def _heads_alike(name: str, config: Mapping[str, Any], tower: bool) -> int | None:
    """Return the number of heads for keys and values where the family has as many of them as for queries."""
    if name != "num_key_value_heads" or config.get(name) != config.get("num_attention_heads"):
        return None
    return SIZES[tower]["num_attention_heads"]


def _layers(config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of layers, and what the config says of each, for a few layers of every kind."""
    name = next((each for each in LAYERS if isinstance(config.get(each), int)), None)
    if name is None:
        return {}
    depth = config[name]
    each_layer = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == depth > 2}
    special = config.get("per_layer_config") or {}
    kinds = [(*(str(values[i]) for values in each_layer.values()), str(special.get(f"{i:02}"))) for i in range(depth)]
    kept = _kept(kinds)
    also = {"encoder_layers": len(kept)} if "encoder_layers" in config else {}
    changed: dict[str, Any] = also | {key: [small[key][i] for i in kept] for key in each_layer} | {name: len(kept)}
    if special:
        remade = {f"{new:02}": special[f"{old:02}"] for new, old in enumerate(kept) if f"{old:02}" in special}
        changed["per_layer_config"] = {i: shrink(values) | _wider(values) for i, values in remade.items()}
    return changed


def _kept(kinds: list[tuple[str, ...]]) -> list[int]:
    """Return the layers to keep: the first ones up to one of the last kind, or the first of each kind."""
    firsts = sorted({kinds.index(kind) for kind in kinds})
    if firsts[-1] < MAX_PREFIX:  # a program that knows a pattern, not a list, finds it unbroken
        return list(range(max(2, firsts[-1] + 1)))
    return sorted([*firsts, *[i for i in range(len(kinds)) if i not in firsts][: max(0, 2 - len(firsts))]])


def _wider(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the head size of single layers that differ from the others: twice as large."""
    return {"head_dim": 32} if "head_dim" in values else {}


def _rope(small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters with lists of the length that the small heads have."""
    heads = small.get("num_attention_heads") or 1
    size = small.get("qk_rope_head_dim") or small.get("head_dim") or int(small.get("hidden_size") or 64) // int(heads)
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values := small.get(key), dict):
            by_kind = any(isinstance(each, dict) for each in values.values())
            found[key] = (
                {kind: each and _sections(each, size) for kind, each in values.items()}
                if by_kind
                else _sections(values, size)
            )
    return found


def _sections(values: Any, head_size: int) -> Any:
    if not isinstance(values, dict):
        return values
    half = int(head_size * float(values.get("partial_rotary_factor") or 1.0)) // 2
    lists = {key: [1.0] * half for key in ("short_factor", "long_factor") if key in values}
    if "mrope_section" in values:
        lists["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return values | lists
