"""Packed rows on MLX. mlx-lm's models get positions and mask from their cache, so a special cache provides them.

Legend: B rows, T tokens of a row, H heads, d head size.
"""

from __future__ import annotations

import inspect
from functools import cache, cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from dualtune.engine.documents import document_rows, spans_of
from dualtune_mlx.families import gpt2
from dualtune_mlx.methods import DropoutSeeds


class SharedBeginnings(NamedTuple):
    """The parent of each token's document, and how many tokens of that it sees (`Batch.parents_BT`)."""

    parents_BT: mx.array
    shared_BT: mx.array

    def seen(self, segments_BT: mx.array, positions_BT: mx.array, queries: slice, keys: slice) -> mx.array:
        """Return which keys are of the shared beginning of each query's document, bool [B, queries, keys]."""
        is_parents_BQK = self.parents_BT[:, queries, None] == segments_BT[:, None, keys]
        return is_parents_BQK & (positions_BT[:, None, keys] < self.shared_BT[:, queries, None])


class PackedRows:
    """Replaces a layer's key/value cache, and keeps only the masks."""

    def __init__(self, segments_BT: mx.array, positions_BT: mx.array, shared: SharedBeginnings | None = None) -> None:
        self.offset = positions_BT
        self.segments_BT = segments_BT
        self.shared = shared
        self._masks: dict[int | None, mx.array] = {}

    def make_mask(self, N: int, *, window_size: int | None = None, return_array: bool = True) -> mx.array:
        """Return which tokens (the last axis) each token sees, bool [B, 1, T, T]: itself and those before it in its
        document, limited to the window if there is one."""
        if window_size not in self._masks:
            distance_BTT = self.offset[:, :, None] - self.offset[:, None, :]
            seen_BTT = (self.segments_BT[:, :, None] == self.segments_BT[:, None, :]) & (distance_BTT >= 0)
            if self.shared is not None:
                seen_BTT |= self.shared.seen(self.segments_BT, self.offset, slice(0, N), slice(0, N))
            if window_size is not None:
                seen_BTT &= distance_BTT < window_size
            self._masks[window_size] = seen_BTT[:, None]
        return self._masks[window_size]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def __getitem__(self, part: int) -> PackedRows:
        """Return the cache of a part of a layer that has attention beside a state."""
        return self

    @cached_property
    def calls(self) -> tuple[list[mx.array], mx.array] | None:
        """`DocumentRows`, for layers with a state; None if each row is one document."""
        rows = document_rows(spans_of(np.array(self.offset)), (self.offset.shape[0], self.offset.shape[1]))
        return None if rows is None else ([mx.array(call_NL) for call_NL in rows.calls], mx.array(rows.back))


def packed_cache(
    model: nn.Module, segments_BT: mx.array, positions_BT: mx.array, shared: SharedBeginnings | None = None
) -> list[PackedRows]:
    """Return the cache for a model. A model that keeps a state, or computes with positions itself, fails with it or
    computes something else, which `dualtune.train.model_checks` detects."""
    return [PackedRows(segments_BT, positions_BT, shared)] * len(make_prompt_cache(model))


class SeparateDocuments:
    """A layer with a state that computes each document of packed rows in a row of its own."""

    dropout_seeds: DropoutSeeds

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        compute: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]  of the class that this precedes
        packed = next((argument for argument in (*args, *options.values()) if isinstance(argument, PackedRows)), None)
        if packed is None:
            return compute(*args, **options)
        call = inspect.signature(compute).bind(*args, **options)
        call.arguments |= {"mask": None, "cache": None}  # what they hold is of rows
        if packed.calls is None:
            return compute(*call.args, **call.kwargs)
        (calls, back), (name, x_BTD) = packed.calls, next(iter(call.arguments.items()))
        seeds_BT, outputs = self.dropout_seeds.seeds_BT, []
        for call_NL in calls:
            call.arguments[name] = x_BTD.flatten(0, 1)[call_NL]
            self.dropout_seeds.seeds_BT = None if seeds_BT is None else seeds_BT.flatten()[call_NL]
            try:
                outputs.append(compute(*call.args, **call.kwargs).flatten(0, 1))
            finally:
                self.dropout_seeds.seeds_BT = seeds_BT
        return mx.concatenate(outputs)[back].reshape(*x_BTD.shape[:2], -1)


def separate_documents(model: nn.Module, seeds: DropoutSeeds) -> bool:
    """Make the parts of layers that keep a state begin anew in each document. Returns whether there are any.

    In a language model these are the parts with a convolution over tokens.
    """
    layers: list[Any] = list(getattr(model, "layers", []))
    parts = [part for layer in layers for part in layer.children().values() if isinstance(part, nn.Module)]
    stateful: list[Any] = [part for part in parts if any(isinstance(m, nn.Conv1d) for m in part.modules())]
    for part in stateful:
        part.__class__ = _per_token(SeparateDocuments, type(part))
        part.dropout_seeds = seeds
    return bool(stateful)


class PerTokenRotary:
    """A rotary embedding that also takes one offset per token, [B, T]."""

    def __call__(self, x_BHTd: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        rotate: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]  of the class that this precedes
        if not (isinstance(offset, mx.array) and offset.ndim == 2):
            return rotate(x_BHTd, offset, **options)
        B, H, T, d = x_BHTd.shape
        rows = x_BHTd.swapaxes(1, 2).reshape(B * T, H, 1, d)  # MLX takes one offset per row
        return rotate(rows, offset.flatten(), **options).reshape(B, T, H, d).swapaxes(1, 2)


def accept_positions(model: nn.Module) -> None:
    """Make every rotary embedding, and GPT-2's position embedding, accept one offset per token. Only the module's class
    changes; its name and parameters stay."""
    for module in model.modules():
        if list(inspect.signature(type(module).__call__).parameters)[1:3] == ["x", "offset"]:
            module.__class__ = _per_token(PerTokenRotary, type(module))
    if isinstance(model, gpt2.Model):
        table: Any = model.model.wpe
        table.__class__ = _per_token(gpt2.PerTokenEmbedding, type(table))


@cache
def _per_token(how: type, kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (how, kind), {})
