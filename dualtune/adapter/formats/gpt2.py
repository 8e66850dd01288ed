"""GPT-2's linear layers, which transformers and mlx-lm store and name differently.

In transformers they are Conv1D with a weight [in, out], and PEFT sets `fan_in_fan_out` in an adapter for them; the
matrices of the adapter itself have the usual orientation. mlx-lm transposes the weights, and names the stack `model.h`
where transformers has `transformer.h`, which is the canonical name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# By `model_type` of config.json. GPT-1 exists only in transformers.
FAMILIES = frozenset({"gpt2", "openai-gpt"})
STACK, MLX_STACK = "transformer.", "model."
_LAYER = r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)"
_CANONICAL, _MLX, _BARE = (re.compile(re.escape(stack) + _LAYER, re.ASCII) for stack in (STACK, MLX_STACK, ""))


def is_fan_in_fan_out(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a model with Conv1D as linear layers."""
    return config.get("model_type") in FAMILIES


def has_gpt2_attention(shapes: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether the (out, in) of a layer are certainly GPT-2's.

    GPT-BigCode has plain linear layers with the same names, but shares one key and value among all heads.
    """
    return any(
        module.endswith(".attn.c_attn") and _CANONICAL.fullmatch(module) is not None and out_dim == 3 * in_dim
        for module, (out_dim, in_dim) in shapes.items()
    )


def is_mlx_name(module: str) -> bool:
    return _MLX.fullmatch(module) is not None


def canonical_name(module: str) -> str:
    """Return transformers' name of a layer that mlx-lm names differently; other names unchanged."""
    return STACK + module.removeprefix(MLX_STACK) if is_mlx_name(module) else module


def mlx_name(module: str) -> str:
    """Return mlx-lm's name of a GPT-2 layer; other names unchanged."""
    return MLX_STACK + module.removeprefix(STACK) if _CANONICAL.fullmatch(module) else module


def canonical_layer(module: str, shape: tuple[int, int] | None) -> tuple[str, tuple[int, int] | None]:
    """Return the canonical name of a layer in a weight file, and the (out, in) of its weight of this shape.

    OpenAI's own files omit `transformer.`; in mlx-lm's files the weight is already transposed.
    """
    if _BARE.fullmatch(module) or _CANONICAL.fullmatch(module):
        return STACK + module.removeprefix(STACK), shape and (shape[1], shape[0])
    return canonical_name(module), shape
