"""Several documents in a row on MLX. mlx-lm's models ask their cache for positions and mask, so a cache tells them.

Legend: B rows, T tokens of a row, H heads, d head size.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from dualtune_mlx import gpt2


class PackedRows:
    """Stands where a layer's key/value cache would, and keeps nothing but the masks."""

    def __init__(self, segments_BT: mx.array, positions_BT: mx.array) -> None:
        self.offset = positions_BT
        self.segments_BT = segments_BT
        self._masks: dict[int | None, mx.array] = {}

    def make_mask(self, N: int, *, window_size: int | None = None, return_array: bool = True) -> mx.array:
        """Which tokens (the last axis) each token sees, bool [B, 1, T, T]: those before it in its document, itself
        included, and where there is a window no further back than that."""
        if window_size not in self._masks:
            distance_BTT = self.offset[:, :, None] - self.offset[:, None, :]
            seen_BTT = (self.segments_BT[:, :, None] == self.segments_BT[:, None, :]) & (distance_BTT >= 0)
            if window_size is not None:
                seen_BTT &= distance_BTT < window_size
            self._masks[window_size] = seen_BTT[:, None]
        return self._masks[window_size]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def packed_cache(model: nn.Module, segments_BT: mx.array, positions_BT: mx.array) -> list[PackedRows]:
    """What to give a model as its cache. A model that keeps a state, or computes with positions itself, stumbles
    over it or computes something else: `dualtune.train.packing` finds out."""
    return [PackedRows(segments_BT, positions_BT)] * len(make_prompt_cache(model))


class PerToken:
    """A rotary embedding that also takes an offset for each token, [B, T]."""

    def __call__(self, x_BHTd: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        rotate: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]  of the class that this goes before
        if not (isinstance(offset, mx.array) and offset.ndim == 2):
            return rotate(x_BHTd, offset, **options)
        B, H, T, d = x_BHTd.shape
        rows = x_BHTd.swapaxes(1, 2).reshape(B * T, H, 1, d)  # one offset a row is what MLX knows
        return rotate(rows, offset.flatten(), **options).reshape(B, T, H, d).swapaxes(1, 2)


def accept_positions(model: nn.Module) -> None:
    """Make every rotary embedding, and GPT-2's table of positions, one for each token. Its class changes and the module
    stays, with its name and parameters."""
    for module in model.modules():
        if list(inspect.signature(type(module).__call__).parameters)[1:3] == ["x", "offset"]:
            module.__class__ = _per_token(PerToken, type(module))
    if isinstance(model, gpt2.Model):
        table: Any = model.model.wpe
        table.__class__ = _per_token(gpt2.PerToken, type(table))


@cache
def _per_token(how: type, kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (how, kind), {})
