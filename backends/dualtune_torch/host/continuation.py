"""How a model continues one text: with a cache if that computes what the model computes without, else without.

Some classes of transformers take a cache and ignore it, or need more arguments with one. So the ways are tried on a few
tokens, the usual one first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from dualtune.backend.decoding import CannotBatch
from dualtune_torch.host.inputs import to_device
from dualtune_torch.kernels import allocator
from dualtune_torch.kernels.trial import ROUNDING, largest_gap
from dualtune_torch.weights.frozen import compute_dtype

# From new tokens [1, T], and what the last call returned beside its logits (None: nothing), to the logits [1, V] after
# the last of them.
Continue = Callable[[Tensor, Any], tuple[Tensor, Any]]
TRIAL = (5, 1, 1, 3, 1)  # tokens of each call
HIGHEST_TOKEN = 100


@dataclass
class _CachedText:
    cache: DynamicCache
    length: int = 0  # tokens in it


def logits_after(model: PreTrainedModel, tokens_BT: Tensor, cache: Cache | None, **options: Any) -> Tensor:
    """Return the logits [B, V] after the last of these tokens, which are added to the cache."""
    return _last_logits(model, tokens_BT, past_key_values=cache, use_cache=True, **options)


class TextContinuation:
    """The way in which a model continues texts, which is found when the first one is."""

    def __init__(self, model: PreTrainedModel, computing: Callable[[], AbstractContextManager[None]]) -> None:
        """`computing`: the context of all forward passes."""
        self._model, self._computing = model, computing

    @cached_property
    def _way(self) -> Continue:
        with self._computing():
            return continuation_of(self._model)

    def next_logits(self, tokens: list[int], held: Any) -> tuple[np.ndarray, Any]:
        """Return the logits after the last of these tokens, float32 [V], and what is held of the text with them."""
        way = self._way
        (tokens_1T,) = to_device([np.array([tokens])], self._model.device)
        with self._computing():
            (logits_V,), held = way(tokens_1T, held)
        return logits_V.float().cpu().numpy().copy(), held

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
    names = [name for name in ("past_key_values", "cache_params") if name in takes]
    with_positions = (False, True) if "position_ids" in takes else (False,)
    return [(name, positions, single) for single in (False, True) for name in names for positions in with_positions]


def _by_cache(model: PreTrainedModel, name: str, positions: bool, single: bool) -> Continue:
    def way(tokens_1T: Tensor, held: Any) -> tuple[Tensor, Any]:
        # Some layers with a state take several tokens for a new text.
        parts = tokens_1T.split(1, dim=1) if single and held else [tokens_1T]
        held = held or _CachedText(DynamicCache(config=model.config))
        logits_1V = torch.empty(0)
        for part in parts:
            begin, held.length = held.length, held.length + part.shape[1]
            options: dict[str, Any] = {name: held.cache, "use_cache": True}
            if positions:
                options["position_ids"] = torch.arange(begin, held.length, device=part.device)[None]
            logits_1V = _last_logits(model, part, **options)
        return logits_1V, held

    way.is_usual = name == "past_key_values" and not positions and not single  # type: ignore[attr-defined]
    return way


def _recomputed(model: PreTrainedModel) -> Continue:
    def way(tokens_1T: Tensor, held: Any) -> tuple[Tensor, Any]:
        all_1T = tokens_1T if held is None else torch.cat([held, tokens_1T], dim=1)
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
    held, before = None, None
    for part in tokens_1T.split(TRIAL, dim=1):
        expected_1V, before = without(part, before)
        try:
            found_1V, held = way(part, held)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if allocator.is_out_of_memory(error):
                raise
            return False
        if not largest_gap(found_1V, expected_1V) <= ROUNDING[compute_dtype(model)]:  # also true for NaN
            return False
    return True


def crop_on_device(held: Any, excess: int) -> bool:
    """Remove this many tokens from the end. False if the cache has forgotten what would be needed again."""
    if isinstance(held, Tensor):
        return False  # computed again anyway
    try:
        held.cache.crop(-excess)
    except (RuntimeError, AttributeError, ValueError):
        return False
    held.length -= excess
    return True
