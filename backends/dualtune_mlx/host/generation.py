"""The keys and values that the core keeps for the next generation, and those of several texts continued together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import BatchKVCache, KVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from dualtune.engine.adapter_bank import adapters_of
from dualtune.engine.decoding import (
    CannotBatch,
    GenerationCache,
    LikelyRow,
    copied_tokens,
    likely_on_host,
    likely_rows,
)
from dualtune_mlx.host.adapter_bank import BankedModel


def crop_on_device(cache: list[Any], excess: int) -> bool:
    """Remove this many tokens from the end. False where a rotating cache has forgotten what would be needed again."""
    if not can_trim_prompt_cache(cache):
        return False
    trim_prompt_cache(cache, excess)
    return True


class RowsCache(BatchKVCache):
    """Keys and values of one layer. Rows of one length, such as a single one, need no mask."""

    has_padding = False

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> Any:
        if self.has_padding or return_array or any(value is not None for value in options.values()):
            return super().make_mask(N, return_array, **options)
        return None if N == 1 else "causal"


def _begin(
    entered: list[RowsCache], caches: Sequence[GenerationCache | None], texts: Sequence[np.ndarray]
) -> list[int]:
    """Put the cached keys and values of texts (int32 [T]) into new layers. Return the number of tokens of each."""
    shared = [_shared(cache, text) for cache, text in zip(caches, texts, strict=True)]
    begin, copied = copied_tokens(texts, shared)
    if not any(copied):
        return copied
    sources = [cache.on_device if cache and number else None for cache, number in zip(caches, copied, strict=True)]
    padding = [begin - number for number in copied]
    for n, layer in enumerate(entered):
        own = [source and (source[n].keys, source[n].values) for source in sources]
        layer.keys, layer.values = (_right_aligned([each and each[i] for each in own], copied, begin) for i in (0, 1))
        layer.left_padding, layer.offset, layer._idx = mx.array(padding), mx.array(copied), begin
        layer.has_padding = any(padding)
    return copied


def _shared(cache: GenerationCache | None, text: np.ndarray) -> int:
    """Return how many tokens of the beginning of a text can be copied."""
    if cache is None or not cache.on_device or any(type(layer) is not KVCache for layer in cache.on_device):
        return 0
    return cache.num_shared(text)


def _right_aligned(rows: Sequence[mx.array | None], lengths: Sequence[int], width: int) -> mx.array:
    """Return the first columns of each row [1, G, T, d], so many, as the last ones of an array [B, G, width, d].

    Of as many columns as tokens: those that are added find no room, and so copy these.
    """
    some = next(row for row in rows if row is not None)
    empty = mx.zeros((1, some.shape[1], 0, some.shape[3]), some.dtype)
    firsts = (empty if row is None else row[..., :length, :] for row, length in zip(rows, lengths, strict=True))
    return mx.concatenate([mx.pad(row, [(0, 0), (0, 0), (width - row.shape[2], 0), (0, 0)]) for row in firsts])


class MlxDecoding:
    """See `dualtune.engine.decoding.Decoding`. Texts are computed padded on the right, and then moved to the right."""

    def __init__(self, model: nn.Module, banked: BankedModel | None = None) -> None:
        """`banked`: the model with an adapter for each row."""
        kinds = {type(layer).__name__ for layer in make_prompt_cache(model)}
        if others := sorted(kinds - {KVCache.__name__}):
            raise CannotBatch(f"its layers keep a state or forget ({', '.join(others)})")
        self._model, self._banked = model, banked
        self._adapters_B = np.zeros(0, np.int32)
        self._cache: list[Any] = []  # empty: there is no row
        self._ahead: MlxNextLogits | None = None  # of the next step, which the cache then holds already…
        self._expected_B = np.zeros(0, np.int32)  # …if the rows go on with these tokens

    def enter(
        self, texts: Sequence[np.ndarray], text_of: Sequence[int] | None = None,
        *, adapters: Sequence[int] | None = None, caches: Sequence[GenerationCache | None] | None = None,
    ) -> MlxNextLogits:  # fmt: skip
        self._forget_ahead()
        adapters_B = adapters_of(texts, adapters)
        entered = [RowsCache([0] * len(texts)) for _ in make_prompt_cache(self._model)]
        copied = _begin(entered, caches or [None] * len(texts), texts)
        new = [text[number:] for text, number in zip(texts, copied, strict=True)]
        padding = [max(map(len, new)) - len(text) for text in new]
        # The last tokens follow by themselves: the output head computes nothing else, because MLX is lazy.
        tokens_BT = np.array([[*text[:-1], *[0] * spare] for text, spare in zip(new, padding, strict=True)], np.int32)
        if tokens_BT.size:
            for layer in entered:
                layer.prepare(right_padding=padding)
            self._logits(mx.array(tokens_BT), entered, adapters_B)
            for layer in entered:
                layer.finalize()
                layer.has_padding |= any(padding)
        logits = self._next_logits(mx.array([int(text[-1]) for text in texts]), entered, adapters_B)
        if text_of is not None:
            index = mx.array(list(text_of))
            for layer in entered:
                layer.filter(index)
            logits, adapters_B = MlxNextLogits(logits.logits_BV[index], self), adapters_B[list(text_of)]
        self._adapters_B = np.concatenate([self._adapters_B, adapters_B])
        if not self._cache:
            self._cache = entered
            return logits
        for present, layer in zip(self._cache, entered, strict=True):
            present.has_padding |= layer.has_padding or present.size() != layer.size()
            present.extend(layer)
        return MlxNextLogits(logits.logits_BV)

    def advance(self, tokens_B: np.ndarray) -> MlxNextLogits:
        logits = self._ahead
        if logits is None or not np.array_equal(tokens_B, self._expected_B):
            self._forget_ahead()
            return self._next_logits(mx.array(tokens_B), self._cache, self._adapters_B)
        self._ahead = None
        return logits

    def hold(self, row: int, text: np.ndarray, cache: GenerationCache) -> None:
        layers = [layer.extract(row) for layer in self._cache]
        if self._ahead is not None:
            crop_on_device(layers, 1)
        mx.async_eval([(layer.keys, layer.values) for layer in layers])  # or what they are made of would stay
        cache.tokens, cache.on_device = text[: layers[0].offset].tolist(), layers

    def leave(self, staying: Sequence[int]) -> None:
        self._adapters_B = self._adapters_B[list(staying)]
        if not staying:
            self._cache, self._ahead = [], None
            return
        index = mx.array(list(staying))
        for layer in self._cache:
            layer.filter(index)
            layer.has_padding = layer.has_padding and any(layer.left_padding.tolist())
        if self._ahead is not None:
            self._ahead = MlxNextLogits(self._ahead.logits_BV[index], self)
            self._expected_B = self._expected_B[list(staying)]

    def compute_ahead(self, tokens_B: mx.array) -> np.ndarray:
        """Start the step after these tokens, and return them: they are transferred while the device goes on."""
        mx.async_eval(tokens_B)  # by itself: arrays that are started together are waited for together
        self._ahead = self._next_logits(tokens_B, self._cache, self._adapters_B)
        mx.async_eval(self._ahead.tokens_B)
        self._expected_B = np.array(tokens_B)
        return self._expected_B

    def _next_logits(self, tokens_B: mx.array, cache: list[Any], adapters_B: np.ndarray) -> MlxNextLogits:
        return MlxNextLogits(self._logits(tokens_B[:, None], cache, adapters_B)[:, -1], self)

    def _logits(self, tokens_BT: mx.array, cache: list[Any], adapters_B: np.ndarray) -> mx.array:
        with self._banked.rows(adapters_B) if self._banked else nullcontext():
            return self._model(tokens_BT, cache=cache)

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead = None
            for layer in self._cache:
                layer.trim(1)


class MlxNextLogits:
    """See `dualtune.engine.decoding.NextLogits`. `decoding` computes the next step ahead, if all its rows are here."""

    def __init__(self, logits_BV: mx.array, decoding: MlxDecoding | None = None) -> None:
        self.logits_BV, self._decoding = logits_BV, decoding
        self.tokens_B = mx.argmax(logits_BV, axis=-1).astype(mx.int32)  # computed where it is asked for: MLX is lazy

    def most_probable(self, *, is_last: bool = False) -> np.ndarray:
        if is_last or self._decoding is None:
            return np.array(self.tokens_B)
        return self._decoding.compute_ahead(self.tokens_B)

    def likely(self, most: int, temperatures_B: np.ndarray) -> list[LikelyRow]:
        logits_BV = self._in_float32
        if mx.default_device().type == mx.DeviceType.cpu:  # where MLX sorts and sums several times slower than NumPy
            return likely_on_host(np.asarray(logits_BV), most, temperatures_B)
        K = min(most, logits_BV.shape[1])
        tokens_BK = mx.argpartition(-logits_BV, K - 1, axis=-1)[:, :K].astype(mx.int32)
        logits_BK = mx.take_along_axis(logits_BV, tokens_BK, axis=-1)
        log_sums_B, largest_B1 = mx.logsumexp(logits_BV, axis=-1), mx.max(logits_BK, axis=-1, keepdims=True)
        tempered_sums_B = log_sums_B - largest_B1[:, 0]
        if (temperatures_B != 1).any():
            tempered_BV = (logits_BV - largest_B1) / mx.array(temperatures_B)[:, None]
            tempered_sums_B = mx.logsumexp(tempered_BV, axis=-1)
        parts = (tokens_BK, logits_BK, log_sums_B, tempered_sums_B)
        mx.eval(logits_BV, *parts)  # all at once: rows that these do not decide are read without waiting again
        return likely_rows(*map(np.array, parts))

    def rows(self, indices: Sequence[int] | None = None) -> np.ndarray:
        logits_BV = np.asarray(self._in_float32)  # shares the device's memory
        return logits_BV.copy() if indices is None else logits_BV[list(indices)]

    @cached_property
    def _in_float32(self) -> mx.array:
        return self.logits_BV.astype(mx.float32)
