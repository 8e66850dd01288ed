"""Tiny models of families that store, name or wrap their weights in their own ways, as transformers saves them."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from dualtune.engine.backend import Engine
from dualtune.engine.testing.conformance import assert_equal, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, Tensors, modules_of
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.places import naming_of

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
IMAGES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
PATCHES = {
    "depth": 1, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


def _turned(**more):
    """Rotary positions in three sections, as Qwen's vision models have them."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], **more}


FAMILIES = {
    "llama": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 128},
    "mixtral": SIZES | {"num_local_experts": 4},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]},
    "qwen2_moe": SIZES | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_next": SIZES | EXPERTS | DELTA | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "deepseek_v3": SIZES | EXPERTS | LATENT | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "glm4_moe": SIZES | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "granitemoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": SIZES | EXPERTS | {
        "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16,
    },
    "gemma3": {
        "text_config": SIZES | {"model_type": "gemma3_text"}, "vision_config": IMAGES, "image_token_index": 90,
        "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 1,
    },
    "mistral3": {"text_config": SIZES | {"model_type": "mistral"}, "vision_config": IMAGES, "image_token_index": 90},
    "qwen2_vl": {
        "text_config": SIZES | {"rope_parameters": _turned()},
        "vision_config": PATCHES | {"embed_dim": 16, "hidden_size": 32}, **TOKENS,
    },
    "qwen3_5": {
        "text_config": SIZES | DELTA | {
            "rope_parameters": _turned(partial_rotary_factor=1.0, mrope_interleaved=True),
        },
        "vision_config": PATCHES | {"hidden_size": 16}, **TOKENS,
    },
}  # fmt: skip


def write_family(family: str, path: Path, seed: int = 0, **keys: object) -> Path:
    """Write a model of a family with random weights, large enough to tell one from the other.

    `keys` of its config in the place of those of FAMILIES.
    """
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**(keys or FAMILIES[family]))
    auto = AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.08 if parameter.dim() > 1 else 0.02) + parameter * 0.5)
    model.save_pretrained(path)
    return path


# --- what tests of mixtures share -------------------------------------------------------------------------------------

VOCAB, LENGTHS = SIZES["vocab_size"], [9, 16, 5, 12]
BATCH = random_batch(LENGTHS, VOCAB)


def written_once(directory: Path, families: Mapping[str, Any]) -> Callable[[str], Path]:
    """Return a function from a family to its model, which is written when it is first asked for."""
    return functools.cache(lambda family: write_family(family, directory / family, **families[family]))


def trained(engine: Engine) -> Engine:
    """Give the engine an adapter that changes something."""
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine


def write_in_all_layouts(directory: Path, spec: AdapterSpec, state: Tensors, model: Path) -> None:
    """Write an adapter in a directory for each layout, which gives it back as it was."""
    adapter = Adapter(spec, state, str(model), naming=naming_of(model, modules_of(state)))
    for layout in ("dual", "peft", "mlx"):
        write_adapter(directory / layout, adapter, layout=layout)
        assert_equal(read_adapter(directory / layout).tensors, state)


def at_tokens(logprobs: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of BATCH without those of its padding, [N, V]."""
    return np.concatenate([logprobs[row, :length] for row, length in enumerate(LENGTHS)])
