"""Layouts of files that transformers writes and mlx-lm's classes do not read: tensors renamed and rearranged.

Each function runs before the class's own `sanitize`. Files in the layout that the class reads pass through unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

Weights = dict[str, mx.array]
Keys = Mapping[str, Any]
Layout = Callable[[Weights, Keys], Weights]


def _renamed(*changes: tuple[str, str]) -> Layout:
    """Return a layout with the names changed by regular expressions, one after another."""

    def rename(weights: Weights, config: Keys) -> Weights:
        renamed: Weights = {}
        for name, array in weights.items():
            for pattern, new in changes:
                name = re.sub(pattern, new, name)
            renamed[name] = array
        return renamed

    return rename


def _without(*beginnings: str) -> Layout:
    """Return a layout without the tensors of other parts of the model."""
    return lambda weights, config: {name: w for name, w in weights.items() if not name.startswith(beginnings)}


def _gpt_oss(weights: Weights, config: Keys) -> Weights:
    """Plain experts: [expert, in, out], with the columns of gate and up by turns."""
    converted: Weights = {}
    for name, array in weights.items():
        if name.endswith("experts.gate_up_proj"):
            beginning = name.removesuffix("gate_up_proj")
            converted[f"{beginning}gate_proj.weight"] = array[..., ::2].swapaxes(-1, -2)
            converted[f"{beginning}up_proj.weight"] = array[..., 1::2].swapaxes(-1, -2)
        elif name.endswith("experts.gate_up_proj_bias"):
            beginning = name.removesuffix("gate_up_proj_bias")
            converted[f"{beginning}gate_proj.bias"] = array[..., ::2]
            converted[f"{beginning}up_proj.bias"] = array[..., 1::2]
        elif name.endswith("experts.down_proj"):
            converted[f"{name}.weight"] = array.swapaxes(-1, -2)
        elif name.endswith("experts.down_proj_bias"):
            converted[name.removesuffix("_bias") + ".bias"] = array
        else:
            converted[name] = array
    return converted


def _phimoe(weights: Weights, config: Keys) -> Weights:
    """The class has biases in any case; without them in the files they are zero."""
    layers = re.compile(r"(.*\.self_attn\.[qkvo]_proj|lm_head)\.weight")
    for name, array in list(weights.items()):
        if layers.fullmatch(name):
            weights.setdefault(name.removesuffix("weight") + "bias", mx.zeros(array.shape[0], array.dtype))
    return weights


def _qwen3_vl_moe(weights: Weights, config: Keys) -> Weights:
    """Experts as [expert, out, in]: the class expects the last two the other way round, as in the published files."""
    narrow = config["text_config"]["moe_intermediate_size"]
    if not any(name.endswith("experts.down_proj") and w.shape[-1] == narrow for name, w in weights.items()):
        return weights
    ends = ("experts.gate_up_proj", "experts.down_proj")
    return {name: w.swapaxes(-1, -2) if name.endswith(ends) else w for name, w in weights.items()}


def _stacked_experts(weights: Weights, config: Keys) -> Weights:
    """Experts one by one become one tensor for all."""
    number = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(\w+)\.weight")
    stacked: Weights = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if parts := number.fullmatch(name):
            experts.setdefault(f"{parts[1]}.switch_mlp.{parts[3]}.weight", {})[int(parts[2])] = array
        else:
            stacked[name] = array
    return stacked | {name: mx.stack([all_[i] for i in sorted(all_)]) for name, all_ in experts.items()}


def _ernie4_5_moe(weights: Weights, config: Keys) -> Weights:
    end = ".moe_statics.e_score_correction_bias"
    for name in [name for name in weights if name.endswith(end)]:
        weights[name.removesuffix(end) + ".correction"] = weights.pop(name).flatten()
    return weights


def _kimi_k25(weights: Weights, config: Keys) -> Weights:
    text = _renamed((r"language_model\.model\.blocks\.", "language_model.model.layers."))
    return _without("model.mm_projector")(text(weights, config), config)


def _longcat_flash(weights: Weights, config: Keys) -> Weights:
    """transformers stores matrices of the experts that pass their input on, and computes nothing with them."""
    number = re.compile(r".*\.mlp\.experts\.(\d+)\..*")
    real = config["n_routed_experts"]
    return {n: w for n, w in weights.items() if (match := number.fullmatch(n)) is None or int(match[1]) < real}


LAYOUTS: dict[str, Layout] = {
    "ernie4_5_moe": _ernie4_5_moe,
    "gemma3n": _renamed((r"^language_model\.model\.", "model.language_model.")),  # the text part by itself
    "gpt_oss": _gpt_oss,
    "kimi_k25": _kimi_k25,
    "kimi_linear": _renamed((r"block_sparse_moe\.((gate|up|down)_proj)\.", r"mlp.\1.")),
    "longcat_flash": _longcat_flash,
    "muse_glimmer": _without("model.vision_"),
    "nanochat": _renamed(
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.layers", "transformer.h"),
        (r"self_attn\.([qkv])_proj", r"attn.c_\1"),
        (r"self_attn\.o_proj", "attn.c_proj"),
        (r"mlp\.fc1", "mlp.c_fc"),
        (r"mlp\.fc2", "mlp.c_proj"),
    ),
    "olmo_hybrid": _renamed(
        (r"attention_layer_norm", "input_layernorm"), (r"feedforward_layer_norm", "post_attention_layernorm")
    ),
    "phimoe": _phimoe,
    "qwen3_5_moe": _stacked_experts,
    "qwen3_vl_moe": _qwen3_vl_moe,
}
