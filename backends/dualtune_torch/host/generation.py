"""The keys and values that the core keeps for the next generation, and those of several texts continued together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from dualtune.engine.adapter_bank import adapters_of
from dualtune.engine.decoding import CannotBatch, GenerationCache, LikelyRow, copied_tokens, likely_rows
from dualtune_torch.host.adapter_bank import BankedModel
from dualtune_torch.host.inputs import to_device
from dualtune_torch.kernels import allocator
from dualtune_torch.kernels.trial import ROUNDING, largest_gap
from dualtune_torch.weights.frozen import compute_dtype

# ----------------------------------------------------------------------------------------------------------------------
# How a model continues one text: with a cache if that computes what the model computes without, else without.
#
# Some classes of transformers take a cache and ignore it, or need more arguments with one. So the ways are tried on a
# few tokens, the usual one first.

# From new tokens [1, T], and what the last call returned beside its logits (None: nothing), to the logits [1, V] after
# the last of them.
Continue = Callable[[Tensor, Any], tuple[Tensor, Any]]
TRIAL = (5, 1, 1, 3, 1)  # tokens of each call
USUAL = ("cache", "past_key_values")  # the argument in transformers 5.24, and before
HIGHEST_TOKEN = 100


@dataclass
class _CachedText:
    cache: Cache
    length: int = 0  # tokens in it


class TextContinuation:
    """The way in which a model continues texts, which is found when the first one is."""

    def __init__(self, model: PreTrainedModel, computing: Callable[[], AbstractContextManager[None]]) -> None:
        """`computing`: the context of all forward passes."""
        self._model, self._computing = model, computing

    @cached_property
    def _way(self) -> Continue:
        with self._computing():
            return continuation_of(self._model)

    def next_logits(self, tokens: list[int], state: Any) -> tuple[np.ndarray, Any]:
        """Return the logits after the last of these tokens, float32 [V], and the cache of the text with them."""
        way = self._way
        (tokens_1T,) = to_device([np.array([tokens])], self._model.device)
        with self._computing():
            (logits_V,), state = way(tokens_1T, state)
        return logits_V.float().cpu().numpy().copy(), state

    def check_batchable(self) -> None:
        """Raise CannotBatch unless a cache of keys and values is all that the model needs."""
        if not getattr(self._way, "is_usual", False):
            raise CannotBatch("a cache of keys and values is not all that it needs to continue a text")


def continuation_of(model: PreTrainedModel) -> Continue:
    """Return the first way to continue a text that computes what the model computes of the whole text."""
    takes = inspect.signature(model.forward).parameters
    ways = [_by_cache(model, *arguments) for arguments in _arguments(takes)]
    without = _recomputed(model)
    return next((way for way in ways if _agrees(model, way, without)), without)


def _arguments(takes: Any) -> list[tuple[str, bool, bool]]:
    """Return how a cache may be given: the argument, whether with positions, and whether with one token at a time."""
    names = [name for name in (*USUAL, "cache_params") if name in takes]
    with_positions = (False, True) if "position_ids" in takes else (False,)
    return [(name, positions, single) for single in (False, True) for name in names for positions in with_positions]


def _by_cache(model: PreTrainedModel, name: str, positions: bool, single: bool) -> Continue:
    def way(tokens_1T: Tensor, state: Any) -> tuple[Tensor, Any]:
        # Some layers with a state take several tokens for a new text.
        parts = tokens_1T.split(1, dim=1) if single and state else [tokens_1T]
        state = state or _CachedText(DynamicCache(config=model.config))
        logits_1V = torch.empty(0)
        for part in parts:
            begin, state.length = state.length, state.length + part.shape[1]
            options: dict[str, Any] = {name: state.cache, "use_cache": True}
            if positions:
                options["position_ids"] = torch.arange(begin, state.length, device=part.device)[None]
            logits_1V = _last_logits(model, part, **options)
        return logits_1V, state

    way.is_usual = name in USUAL and not positions and not single  # type: ignore[attr-defined]
    return way


def _recomputed(model: PreTrainedModel) -> Continue:
    def way(tokens_1T: Tensor, state: Any) -> tuple[Tensor, Any]:
        all_1T = tokens_1T if state is None else torch.cat([state, tokens_1T], dim=1)
        return _last_logits(model, all_1T, use_cache=False), all_1T

    return way


def _last_logits(model: PreTrainedModel, tokens_BT: Tensor, **options: Any) -> Tensor:
    T = tokens_BT.shape[1]
    if T > 1 and "logits_to_keep" in inspect.signature(model.forward).parameters:  # most models have it
        # An index, not a number: that gives a slice, and a slice of many rows times frozen weights is a batched
        # product in torch, several times slower on a CPU.
        options["logits_to_keep"] = torch.tensor([T - 1], device=tokens_BT.device)
    return model(tokens_BT, **options).logits[:, -1]


def _agrees(model: PreTrainedModel, way: Continue, without: Continue) -> bool:
    """Return whether a way computes the same of a few tokens as the model without a cache."""
    embedding: Any = model.get_input_embeddings()
    V = embedding.weight.shape[0]
    tokens_1T = (torch.arange(sum(TRIAL), device=model.device) * 37 % HIGHEST_TOKEN % V)[None]
    state, before = None, None
    for part in tokens_1T.split(TRIAL, dim=1):
        expected_1V, before = without(part, before)
        try:
            found_1V, state = way(part, state)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if allocator.is_out_of_memory(error):
                raise
            return False
        if not largest_gap(found_1V, expected_1V) <= ROUNDING[compute_dtype(model)]:  # also true for NaN
            return False
    return True


def crop_on_device(state: Any, excess: int) -> bool:
    """Remove this many tokens from the end. False if the cache has forgotten what would be needed again."""
    if isinstance(state, Tensor):
        return False  # computed again anyway
    try:
        state.cache.crop(-excess)
    except (RuntimeError, AttributeError, ValueError):
        return False
    state.length -= excess
    return True


# ----------------------------------------------------------------------------------------------------------------------
SPARE = 64  # tokens for which there is room in the cache when it grows: it is not copied at each token


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, [B, G, T, d]: views of tensors with room for more tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return all."""
        if not self.is_initialized:
            self.begin(key_states, value_states)
            return self.tensors
        B, added = key_states.shape[0], key_states.shape[2]
        before, end = self._end, self._end + added
        if end > self._rooms[0].shape[2]:
            before, end = before - self._start, end - self._start
            rooms = (_room(tensor, B, end) for tensor in self.tensors)
            self._hold([_written(room, old, 0, before) for room, old in zip(rooms, self.tensors, strict=True)], before)
        keys, values = self._rooms
        keys[:B, :, before:end] = key_states
        values[:B, :, before:end] = value_states
        self._show(B, self._start, end)
        return self.tensors

    def begin(self, keys: Tensor, values: Tensor) -> None:
        """Hold these, which others may hold too: the first tokens that are added find no room, and so copy them."""
        self.lazy_initialization(keys, values)
        self._hold((keys, values), keys.shape[2])

    def begin_with(self, rows: Mapping[int, DynamicLayer], lengths_B: Sequence[int], width: int) -> None:
        """Hold copies of the first columns of other layers, so many, as the last of a width; zeros before them.

        `rows`: the layers by the row that each becomes.
        """
        tensors = [cast("tuple[Tensor, Tensor]", (layer.keys, layer.values)) for layer in rows.values()]
        self.lazy_initialization(*tensors[0])
        rooms = [_room(tensor, len(lengths_B), width) for tensor in tensors[0]]
        for room, own in zip(rooms, zip(*tensors, strict=True), strict=True):
            room[:, :, :width] = 0
            for row, tensor in zip(rows, own, strict=True):
                _written(room, tensor[:, :, : lengths_B[row]], row, width)
        self._hold(rooms, width)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens."""
        return cast(Tensor, self.keys), cast(Tensor, self.values)

    def put_after(self, present: GrowingLayer, width: int) -> None:
        """Put the rows of another layer before these, all with so many columns: zeros stand before their texts."""
        rooms = list[Tensor]()
        for old, new in zip(present.tensors, self.tensors, strict=True):
            room = _room(new, len(old) + len(new), width)
            room[:, :, :width] = 0
            rooms.append(_written(_written(room, old, 0, width), new, len(old), width))
        self._hold(rooms, width)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove so many tokens, a negative number, from the end."""
        if self.is_initialized:
            self._show(len(self.tensors[0]), self._start, self._end + tokens_to_remove)

    def copy(self, rows: Tensor) -> None:
        """Hold these rows instead; one may occur several times."""
        self._hold([tensor.index_select(0, rows) for tensor in self.tensors], self._end - self._start)

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
        """Hold these tensors instead; all rows and so many columns of them are used."""
        self._rooms = rooms
        self._show(len(rooms[0]), 0, width)

    def _show(self, rows: int, start: int, end: int) -> None:
        self._start, self._end = start, end
        keys, values = self._rooms
        self.keys, self.values = keys[:rows, :, start:end], values[:rows, :, start:end]


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


def _new_cache() -> Cache:
    return Cache(layer_class_to_replicate=GrowingLayer)


def _cache_of(caches: Sequence[GenerationCache | None], texts: Sequence[np.ndarray]) -> tuple[Cache, int]:
    """Return a cache with the cached keys and values of texts (int32 [T]), and the number of its columns."""
    shared = [_shared(own, text) for own, text in zip(caches, texts, strict=True)]
    begin, copied_B = copied_tokens(texts, shared)
    sources = {i: cast(_CachedText, own.on_device).cache.layers
               for i, own in enumerate(caches) if own is not None and copied_B[i]}  # fmt: skip
    cache = _new_cache()
    if not sources:
        return cache, 0
    for layers in zip(*sources.values(), strict=True):
        grown, rows = GrowingLayer(), dict(zip(sources, cast("Sequence[DynamicLayer]", layers), strict=True))
        if layers[0].is_initialized:
            grown.begin_with(rows, copied_B, begin)
        cache.layers.append(grown)
    return cache, begin


def _shared(cache: GenerationCache | None, text: np.ndarray) -> int:
    """Return how many tokens of the beginning of a text can be copied."""
    if cache is None or not isinstance(cache.on_device, _CachedText):
        return 0
    shared, layers = cache.num_shared(text), cast("list[DynamicLayer]", cache.on_device.cache.layers)
    has_slid = any(layer.is_initialized and cast(Tensor, layer.keys).shape[2] < shared for layer in layers)
    return 0 if has_slid else shared


class TorchDecoding:
    """See `dualtune.engine.decoding.Decoding`.

    In the cache each row ends at the last column, and what is before its first token is masked.
    """

    def __init__(
        self, model: PreTrainedModel, computing: Callable[[], AbstractContextManager[None]],
        banked: BankedModel | None = None,
    ) -> None:  # fmt: skip
        """`computing`: the context of all forward passes. `banked`: the model with an adapter for each row."""
        _check_batchable(model)
        self._model, self._computing, self._banked = model, computing, banked
        self._device = model.device  # transformers looks for it in the parameters each time
        takes = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in takes
        self._cache_argument = next((name for name in USUAL if name in takes), USUAL[-1])
        self._cache: Cache | None = None  # None: there is no row
        self._width = 0  # of the cache
        self._lengths_B = np.zeros(0, np.int64)  # tokens of each row
        self._adapters_B = np.zeros(0, np.int32)

    def enter(
        self, texts: Sequence[np.ndarray], text_of: Sequence[int] | None = None,
        *, adapters: Sequence[int] | None = None, caches: Sequence[GenerationCache | None] | None = None,
    ) -> TorchNextLogits:  # fmt: skip
        lengths_B, adapters_B = np.array([len(text) for text in texts], np.int64), adapters_of(texts, adapters)
        width = int(lengths_B.max())
        tokens_BT = np.zeros((len(texts), width), np.int64)
        for row, text in zip(tokens_BT, texts, strict=True):
            row[width - len(text) :] = text
        entered, begin = _cache_of(caches or [None] * len(texts), texts)
        logits = self._next_logits(tokens_BT[:, begin:], lengths_B, width, entered, adapters_B)
        if text_of is not None:
            (indices,) = to_device([np.array(text_of)], self._device)
            for layer in _layers(entered):
                layer.copy(indices)
            logits, lengths_B, adapters_B = logits.of(indices), lengths_B[list(text_of)], adapters_B[list(text_of)]
        width = max(width, self._width)
        if self._cache is not None:  # those that are there stay before those that have entered
            for present, layer in zip(_layers(self._cache), _layers(entered), strict=True):
                layer.put_after(present, width)
        self._cache, self._width = entered, width
        self._lengths_B = np.concatenate([self._lengths_B, lengths_B])
        self._adapters_B = np.concatenate([self._adapters_B, adapters_B])
        return logits

    def advance(self, tokens_B: np.ndarray) -> TorchNextLogits:
        self._lengths_B, self._width = self._lengths_B + 1, self._width + 1
        tokens_BT = tokens_B[:, None].astype(np.int64)
        return self._next_logits(tokens_BT, self._lengths_B, self._width, self._cache, self._adapters_B)

    def _next_logits(
        self, tokens_BT: np.ndarray, lengths_B: np.ndarray, width: int, cache: Cache | None, adapters_B: np.ndarray
    ) -> TorchNextLogits:
        """Compute new tokens, with which the rows in a cache of this width have these lengths."""
        T, padding_B = tokens_BT.shape[1], width - lengths_B
        positions_BT = np.maximum(np.arange(width - T, width) - padding_B[:, None], 0)
        # With a sharded base, the others hear of an error in this block.
        with self._computing(), self._banked.rows(adapters_B) if self._banked else nullcontext():
            tokens, positions, padding = to_device([tokens_BT, positions_BT, padding_B[:, None]], self._device)
            options: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
            if self._takes_positions:
                options["position_ids"] = positions
            if padding_B.any():
                options["attention_mask"] = (torch.arange(width, device=tokens.device) >= padding).long()
            return TorchNextLogits(_last_logits(self._model, tokens, **options))

    def hold(self, row: int, text: np.ndarray, cache: GenerationCache) -> None:
        length, copy = int(self._lengths_B[row]), _new_cache()
        for layer in cast("list[GrowingLayer]", self._cache.layers if self._cache else []):
            copied = GrowingLayer()
            if layer.is_initialized:
                copied.begin(*(tensor[row : row + 1, :, -length:].clone() for tensor in layer.tensors))
            copy.layers.append(copied)
        cache.tokens, cache.on_device = text[:length].tolist(), _CachedText(copy, length)

    def leave(self, staying: Sequence[int]) -> None:
        self._lengths_B, self._adapters_B = self._lengths_B[list(staying)], self._adapters_B[list(staying)]
        if not staying or self._cache is None:
            self._cache, self._width = None, 0
            return
        self._width = max(1, int(self._lengths_B.max()))
        moves = [(source, place) for place, source in enumerate(staying) if source != place]
        rows, sources, places = (
            torch.tensor(indices, dtype=torch.long, device=self._device)
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
    """See `dualtune.engine.decoding.NextLogits`."""

    def __init__(self, logits_BV: Tensor) -> None:
        self._logits_BV = logits_BV

    def of(self, rows: Tensor) -> TorchNextLogits:
        return TorchNextLogits(self._logits_BV.index_select(0, rows))

    def most_probable(self, *, is_last: bool = False) -> np.ndarray:
        if self._logits_BV.device.type == "cpu" and self._logits_BV.dtype == torch.float32:
            return self._logits_BV.numpy().argmax(-1).astype(np.int32)  # torch's own takes ten times as long there
        return self._logits_BV.argmax(-1).int().cpu().numpy()

    def likely(self, most: int, temperatures_B: np.ndarray) -> list[LikelyRow]:
        logits_BV = self._logits_BV.float()
        logits_BK, tokens_BK = logits_BV.topk(min(most, logits_BV.shape[1]))
        log_sums_B = logits_BV.logsumexp(-1)
        tempered_sums_B = log_sums_B - logits_BK[:, 0]
        if (temperatures_B != 1).any():
            (temperatures,) = to_device([temperatures_B], logits_BV.device)
            tempered_sums_B = ((logits_BV - logits_BK[:, :1]) / temperatures[:, None]).logsumexp(-1)
        # One array, so that the device is waited for once.
        sums_B2 = torch.stack([log_sums_B, tempered_sums_B], dim=1)
        packed = (
            torch.cat([tokens_BK.int(), logits_BK.view(torch.int32), sums_B2.view(torch.int32)], dim=1).cpu().numpy()
        )
        K = logits_BK.shape[1]
        return likely_rows(
            packed[:, :K], *(part.view(np.float32) for part in (packed[:, K : 2 * K], packed[:, -2], packed[:, -1]))
        )

    def rows(self, indices: Sequence[int] | None = None) -> np.ndarray:
        logits_BV = self._logits_BV if indices is None else self._logits_BV[list(indices)]
        return logits_BV.float().cpu().numpy()
