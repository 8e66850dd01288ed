"""The keys and values that the core keeps for the next generation, and those of several texts continued together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import BatchKVCache, KVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from dualtune.backend.decoding import CannotBatch


def crop_on_device(held: list[Any], excess: int) -> bool:
    """Remove this many tokens from the end. False where a rotating cache has forgotten what would be needed again."""
    if not can_trim_prompt_cache(held):
        return False
    trim_prompt_cache(held, excess)
    return True


class MlxDecoding:
    """See `dualtune.backend.decoding.Decoding`. Texts are computed padded on the right, and then moved to the right."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {type(layer).__name__ for layer in make_prompt_cache(model)}
        if others := sorted(kinds - {KVCache.__name__}):
            raise CannotBatch(f"its layers keep a state or forget ({', '.join(others)})")
        self._model = model
        self._cache: list[Any] = []  # empty: there is no row

    def enter(self, texts: Sequence[np.ndarray]) -> None:
        lengths = [len(text) for text in texts]
        width = max(1, *lengths)  # one column of padding, if there is nothing to compute
        tokens_BT = np.zeros((len(texts), width), np.int32)
        for b, text in enumerate(texts):
            tokens_BT[b, : len(text)] = text
        padding = [width - length for length in lengths]
        entered = [BatchKVCache([0] * len(texts)) for _ in make_prompt_cache(self._model)]
        for layer in entered:
            layer.prepare(right_padding=padding)
        self._model(mx.array(tokens_BT), cache=entered)
        for layer in entered:
            layer.finalize()
        if self._cache:
            for held, layer in zip(self._cache, entered, strict=True):
                held.extend(layer)
        else:
            self._cache = entered
        mx.eval([layer.state[:4] for layer in self._cache])

    def advance(self, tokens_B: np.ndarray) -> MlxNextLogits:
        return MlxNextLogits(self._model(mx.array(tokens_B[:, None]), cache=self._cache)[:, -1])

    def leave(self, staying: Sequence[int]) -> None:
        if not staying:
            self._cache = []
            return
        index = mx.array(list(staying))
        for layer in self._cache:
            layer.filter(index)


class MlxNextLogits:
    """See `dualtune.backend.decoding.NextLogits`."""

    def __init__(self, logits_BV: mx.array) -> None:
        self._logits_BV = logits_BV

    def most_probable(self) -> np.ndarray:
        return np.array(mx.argmax(self._logits_BV, axis=-1).astype(mx.int32))

    def rows(self) -> np.ndarray:
        return np.array(self._logits_BV.astype(mx.float32))
