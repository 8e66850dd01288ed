"""GPT-2's linear layers, which two tools store and call differently.

In transformers they are Conv1D, whose weight is [in, out], and PEFT says `fan_in_fan_out` of an adapter for them; the
matrices of the adapter itself lie as always. mlx-lm turns the weights, and calls the stack `model.h` where transformers
calls it `transformer.h`, which is the canonical name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# By `model_type` of config.json. GPT-1 is in transformers only.
FAMILIES = frozenset({"gpt2", "openai-gpt"})
STACK, MLX_STACK = "transformer.", "model."
_LAYER = r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)"
_CANONICAL, _MLX, _BARE = (re.compile(re.escape(stack) + _LAYER, re.ASCII) for stack in (STACK, MLX_STACK, ""))


def is_fan_in_fan_out(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model whose linear layers are Conv1D."""
    return config.get("model_type") in FAMILIES


def has_gpt2_attention(shapes: Mapping[str, tuple[int, int]]) -> bool:
    """Whether (out, in) of a layer are those of GPT-2 for sure: GPT-BigCode, whose plain linear layers have the same
    names, shares one key and value among all heads."""
    return any(
        module.endswith(".attn.c_attn") and _CANONICAL.fullmatch(module) is not None and out_dim == 3 * in_dim
        for module, (out_dim, in_dim) in shapes.items()
    )


def is_mlx_name(module: str) -> bool:
    return _MLX.fullmatch(module) is not None


def canonical_name(module: str) -> str:
    """transformers' name of a layer that mlx-lm calls otherwise; any other name as it is."""
    return STACK + module.removeprefix(MLX_STACK) if is_mlx_name(module) else module


def mlx_name(module: str) -> str:
    """mlx-lm's name of a layer of GPT-2; any other name as it is."""
    return MLX_STACK + module.removeprefix(STACK) if _CANONICAL.fullmatch(module) else module


def in_file(module: str, shape: tuple[int, int] | None) -> tuple[str, tuple[int, int] | None]:
    """The canonical name of a layer that a file of weights names, and (out, in) of a weight of this shape there.

    OpenAI's own files leave `transformer.` out; mlx-lm's have the weight turned already.
    """
    if _BARE.fullmatch(module) or _CANONICAL.fullmatch(module):
        return STACK + module.removeprefix(STACK), shape and (shape[1], shape[0])
    return canonical_name(module), shape
