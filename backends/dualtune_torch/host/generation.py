"""The keys and values that the core keeps for the next generation, and those of several texts continued together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from dualtune.backend.decoding import CannotBatch
from dualtune_torch.host.continuation import logits_after
from dualtune_torch.host.inputs import to_device

SPARE = 64  # tokens for which there is room in the cache when it grows: it is not copied at each token


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, [B, G, T, d]: views of tensors with room for more tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._hold((key_states, value_states), key_states.shape[2])
            return self.tensors
        B, added = len(key_states), key_states.shape[2]
        if self._end + added > self._rooms[0].shape[2]:
            width = self._end - self._start
            rooms = (_room(tensor, B, width + added) for tensor in self.tensors)
            self._hold([_written(room, old, 0, width) for room, old in zip(rooms, self.tensors, strict=True)], width)
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:B, :, self._end : self._end + added] = new
        self._show(B, self._start, self._end + added)
        return self.tensors

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens."""
        return cast(Tensor, self.keys), cast(Tensor, self.values)

    def put_after(self, held: GrowingLayer, width: int) -> None:
        """Put the rows of another layer before these, all with so many columns: zeros stand before their texts."""
        rooms = list[Tensor]()
        for old, new in zip(held.tensors, self.tensors, strict=True):
            room = _room(new, len(old) + len(new), width)
            room[:, :, :width] = 0
            rooms.append(_written(_written(room, old, 0, width), new, len(old), width))
        self._hold(rooms, width)

    def keep(self, staying: Tensor, sources: Tensor, places: Tensor, width: int) -> None:
        """Keep the last columns of these rows. `sources` are those of them whose `places` are now others'.

        Only these are copied while more than half of the room is used.
        """
        if 2 * len(staying) <= len(self._rooms[0]):
            self._hold([tensor[:, :, -width:].index_select(0, staying) for tensor in self.tensors], width)
            return
        if len(places):
            for tensor in self.tensors:
                tensor.index_copy_(0, places, tensor.index_select(0, sources))
        self._show(len(staying), self._end - width, self._end)

    def _hold(self, rooms: Sequence[Tensor], width: int) -> None:
        """Hold these instead, of which all rows and so many columns are used."""
        self._rooms = rooms
        self._show(len(rooms[0]), 0, width)

    def _show(self, rows: int, start: int, end: int) -> None:
        self._start, self._end = start, end
        self.keys, self.values = (room[:rows, :, start:end] for room in self._rooms)


def _room(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return a tensor for keys or values, with room for more columns."""
    _, G, _, d = like.shape
    return like.new_empty((rows, G, columns + SPARE, d))


def _written(room: Tensor, tensor: Tensor, row: int, end: int) -> Tensor:
    """Write keys or values into a room, from this row on, with their last column before `end`. Return the room."""
    B, _, T, _ = tensor.shape
    room[row : row + B, :, end - T : end] = tensor
    return room


def _layers(cache: Cache) -> list[GrowingLayer]:
    """Return the layers that hold something; those that share the keys of another hold nothing."""
    return [layer for layer in cast("list[GrowingLayer]", cache.layers) if layer.is_initialized]


class TorchDecoding:
    """See `dualtune.backend.decoding.Decoding`.

    In the cache each row ends at the last column, and what is before its first token is masked.
    """

    def __init__(self, model: PreTrainedModel, computing: Callable[[], AbstractContextManager[None]]) -> None:
        """`computing`: the context of all forward passes."""
        _check_batchable(model)
        self._model, self._computing = model, computing
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._cache: Cache | None = None  # None: there is no row
        self._width = 0  # of the cache
        self._lengths_B = np.zeros(0, np.int64)  # tokens of each row

    def enter(self, texts: Sequence[np.ndarray]) -> TorchNextLogits:
        lengths_B = np.array([len(text) for text in texts], np.int64)
        width = int(lengths_B.max())
        tokens_BT = np.zeros((len(texts), width), np.int64)
        for row, text in zip(tokens_BT, texts, strict=True):
            row[width - len(text) :] = text
        entered = Cache(layer_class_to_replicate=GrowingLayer)
        logits = self._next_logits(tokens_BT, lengths_B, width, entered)
        width = max(width, self._width)
        if self._cache is not None:  # those that are there stay before those that have entered
            for held, layer in zip(_layers(self._cache), _layers(entered), strict=True):
                layer.put_after(held, width)
        self._cache, self._width = entered, width
        self._lengths_B = np.concatenate([self._lengths_B, lengths_B])
        return logits

    def advance(self, tokens_B: np.ndarray) -> TorchNextLogits:
        self._lengths_B, self._width = self._lengths_B + 1, self._width + 1
        return self._next_logits(tokens_B[:, None].astype(np.int64), self._lengths_B, self._width, self._cache)

    def _next_logits(
        self, tokens_BT: np.ndarray, lengths_B: np.ndarray, width: int, cache: Cache | None
    ) -> TorchNextLogits:
        """Compute new tokens, with which the rows in a cache of this width have these lengths."""
        T, padding_B = tokens_BT.shape[1], width - lengths_B
        positions_BT = np.maximum(np.arange(width - T, width) - padding_B[:, None], 0)
        tokens, positions, padding = to_device([tokens_BT, positions_BT, padding_B[:, None]], self._model.device)
        options: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        if padding_B.any():
            options["attention_mask"] = (torch.arange(width, device=tokens.device) >= padding).long()
        with self._computing():
            return TorchNextLogits(logits_after(self._model, tokens, cache, **options))

    def leave(self, staying: Sequence[int]) -> None:
        self._lengths_B = self._lengths_B[list(staying)]
        if not staying or self._cache is None:
            self._cache, self._width = None, 0
            return
        self._width = max(1, int(self._lengths_B.max()))
        moves = [(source, place) for place, source in enumerate(staying) if source != place]
        rows, sources, places = (
            torch.tensor(indices, dtype=torch.long, device=self._model.device)
            for indices in (list(staying), [source for source, _ in moves], [place for _, place in moves])
        )
        for layer in _layers(self._cache):
            layer.keep(rows, sources, places, self._width)


def _check_batchable(model: PreTrainedModel) -> None:
    """Raise CannotBatch unless every layer keeps the keys and values of single tokens."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    others = sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
    if others or getattr(model, "_is_stateful", False):
        raise CannotBatch(f"its layers keep a state ({', '.join(others) or type(model).__name__})")
    if getattr(model.config.get_text_config(), "attention_chunk_size", None) is not None:
        raise CannotBatch("its attention ends at fixed positions (attention_chunk_size)")


class TorchNextLogits:
    """See `dualtune.backend.decoding.NextLogits`."""

    def __init__(self, logits_BV: Tensor) -> None:
        self._logits_BV = logits_BV

    def most_probable(self, *, is_last: bool = False) -> np.ndarray:
        return self._logits_BV.argmax(-1).int().cpu().numpy()

    def rows(self) -> np.ndarray:
        return self._logits_BV.float().cpu().numpy()
