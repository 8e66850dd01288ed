"""Rotary embeddings of mlx-lm's classes, with the frequencies that transformers computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.rope_utils import YarnRoPE


def correct_frequencies(model: nn.Module, config: Mapping[str, Any]) -> None:
    """mlx-lm's YaRN begins and ends its ramp at whole dimensions, also where the config has `truncate: false`."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("truncate", True):
        return
    for module in model.modules():
        if isinstance(module, YarnRoPE):
            module._freqs = _yarn(module.dims, config["rope_theta"], scaling)


def _yarn(dims: int, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """Return the period of each pair of dimensions (Peng et al., YaRN, arXiv 2309.00071), not truncated."""

    def dimension(turns: float) -> float:
        """Return the dimension that turns this often over the length that the model was first trained on."""
        return (
            dims * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))
        )

    low = max(dimension(scaling.get("beta_fast") or 32), 0)
    high = min(dimension(scaling.get("beta_slow") or 1), dims - 1)
    slowed = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    periods = base ** (mx.arange(0, dims, 2) / dims)
    return 1 / ((1 - slowed) / periods + slowed / (scaling["factor"] * periods))
