"""What single families need besides small sizes: each entry changes the small config in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], object]


def _set(**values: Any) -> Change:
    return lambda config: config.update(values)


def _in(part: str, change: Change) -> Change:
    return lambda config: change(config[part])


HEAD_DIM = _set(head_dim=16)

QUIRKS: dict[str, Change] = {
    "ministral": HEAD_DIM,
    "nemotron": HEAD_DIM,
    "hunyuan_v1_dense": HEAD_DIM,
    "hunyuan_v1_moe": HEAD_DIM,
    "hunyuan_vl": _in("text_config", HEAD_DIM),
    "mamba2": _set(num_heads=8),
    "zaya": _set(num_experts_per_tok=1),
    "reformer": _set(is_decoder=True),
    "lfm2_moe": _set(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
}
