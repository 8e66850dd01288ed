"""Several texts continued together: what an engine computes for them, one token of each row at a time.

Which token comes next is decided in the core (`train/generation/batched.py`), and so is when a row enters or leaves.
Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

# ----------------------------------------------------------------------------------------------------------------------
# The cache of a generation: keys and values of a text, for a next prompt that begins with the same tokens.


@dataclass(slots=True)
class GenerationCache:
    """What an engine keeps between two calls of `generate`. It belongs to one engine with one adapter."""

    tokens: list[int] = field(default_factory=list[int])  # whose keys and values it holds
    on_device: Any = None  # the backend's own; None: nothing is cached

    def num_shared(self, prompt: np.ndarray) -> int:
        """Return how many tokens at the start of a prompt (int32 [T]) it holds: T - 1 at most.

        The last one is always computed, because its logits are needed.
        """
        length = min(len(self.tokens), len(prompt) - 1)
        differs = np.flatnonzero(np.asarray(self.tokens[:length], prompt.dtype) != prompt[:length])
        return int(differs[0]) if differs.size else length

    def crop(self, length: int, crop_on_device: Callable[[Any, int], bool]) -> int:
        """Keep the first `length` tokens. Return how many are left: none if they cannot be cropped on the device."""
        excess = len(self.tokens) - length
        if self.on_device is None or (excess > 0 and not crop_on_device(self.on_device, excess)):
            length = 0
        self.tokens = self.tokens[:length]
        if not length:
            self.on_device = None
        return length

    def clear(self) -> None:
        """Hold nothing, such as after the adapter has changed."""
        self.tokens, self.on_device = [], None


def continue_prompt(
    prompt: np.ndarray,
    choose: Callable[[np.ndarray], int | None],
    cache: GenerationCache | None,
    *,
    forward: Callable[[list[int], Any], tuple[np.ndarray, Any]],
    crop_on_device: Callable[[Any, int], bool],
) -> Iterator[int]:
    """Yield the tokens of `Engine.generate`, with what only the backend can do given as functions.

    `forward` gets new tokens and the backend's part of the cache (None: an empty one), and returns the logits after the
    last token (float32 [V]) and that part with the new tokens. `crop_on_device` removes a number of tokens from its
    end, and returns whether it could.
    """
    cache = cache or GenerationCache()
    new: list[int] = prompt[cache.crop(cache.num_shared(prompt), crop_on_device) :].tolist()
    while True:
        on_device, cache.on_device = cache.on_device, None  # an interrupted forward pass leaves no half of a token
        logits_V, on_device = forward(new, on_device)
        cache.tokens, cache.on_device = [*cache.tokens, *new], on_device
        token = choose(logits_V)
        if token is None:
            return
        yield token
        new = [token]


def copied_tokens(texts: Sequence[np.ndarray], shared: Sequence[int]) -> tuple[int, list[int]]:
    """Return the columns before those that are computed of texts (int32 [T]), all ending at the same one, and of how
    many tokens of each the keys and values are copied, if so many are there.

    As many columns are computed of each as of the text with the most new tokens.
    """
    most_new = max(len(text) - number for text, number in zip(texts, shared, strict=True))
    return max(map(len, texts)) - most_new, [max(0, len(text) - most_new) for text in texts]


# ----------------------------------------------------------------------------------------------------------------------
class CannotBatch(Exception):
    """The cache of this model cannot hold several rows. The text says why, for people."""


@dataclass(frozen=True, slots=True)
class LikelyRow:
    """The most probable next tokens of a row, and what makes probabilities of their logits."""

    tokens_K: np.ndarray  # int32 [K], most probable first, and of equals the first of the vocabulary
    logits_K: np.ndarray  # float32 [K]
    log_sum: float  # log Σ exp(logit) over the vocabulary: log p = logit - log_sum
    tempered_sum: float  # log Σ exp((logit - largest logit) / temperature)

    def logprobs(self, logits: np.ndarray, temperature: float | None = None) -> np.ndarray:
        """Return log p of tokens with these logits, float64; with the row's temperature, of what it draws from."""
        logits = logits.astype(np.float64)
        if temperature is None:
            return logits - self.log_sum
        return (logits - float(self.logits_K[0])) / temperature - self.tempered_sum


def likely_rows(
    tokens_BK: np.ndarray, logits_BK: np.ndarray, log_sums_B: np.ndarray, tempered_sums_B: np.ndarray
) -> list[LikelyRow]:
    """Return the rows of what a device has computed, whatever the order of its tokens."""
    # One sort of integers, which is eight times as fast as one by two keys: above a token the bits of its logit,
    # inverted, so that the largest comes first. Adding 0 makes -0 equal to 0.
    falling_BK = ~_ordered((logits_BK.astype(np.float32) + 0).view(np.int32))
    keys_BK = falling_BK.astype(np.int64) << 32 | tokens_BK
    keys_BK.sort(axis=-1)
    tokens_BK, logits_BK = keys_BK.astype(np.int32), _ordered(~(keys_BK >> 32).astype(np.int32)).view(np.float32)
    sums = zip(log_sums_B.tolist(), tempered_sums_B.tolist(), strict=True)
    return [LikelyRow(*row, *both) for row, both in zip(zip(tokens_BK, logits_BK, strict=True), sums, strict=True)]


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Return the bits of float32 as int32 in the order of the numbers; and back."""
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def likely_on_host(logits_BV: np.ndarray, most: int, temperatures_B: np.ndarray) -> list[LikelyRow]:
    """Return the `most` most probable tokens of each row of logits, float32 [B, V], that NumPy can read."""
    most = min(most, logits_BV.shape[1])
    tokens_BK = np.argpartition(logits_BV, -most, axis=-1)[:, -most:]
    logits_BK = np.take_along_axis(logits_BV, tokens_BK, -1)
    largest_B1 = logits_BK.max(-1, keepdims=True)
    shifted_BV = logits_BV - largest_B1
    sums_B = tempered_sums_B = np.log(np.exp(shifted_BV).sum(-1))
    if (temperatures_B != 1).any():
        with np.errstate(over="ignore"):  # of a very low temperature
            tempered_sums_B = np.log(np.exp(shifted_BV / temperatures_B[:, None]).sum(-1))
    return likely_rows(tokens_BK, logits_BK, largest_B1[:, 0] + sums_B, tempered_sums_B)


class NextLogits(Protocol):
    """The logits of the next token of each row, still on the device: only what is read is transferred."""

    def most_probable(self, *, is_last: bool = False) -> np.ndarray:
        """Return the most probable token of each row, the first of equals, int32 [B].

        Unless they are the last ones, an engine may compute the step after them ahead, in case `advance` gets them.
        """
        ...

    def likely(self, most: int, temperatures_B: np.ndarray) -> list[LikelyRow]:
        """Return the `most` most probable tokens of each row (or all, of a small vocabulary)."""
        ...

    def rows(self, indices: Sequence[int] | None = None) -> np.ndarray:
        """Return all logits of all rows or of these, float32 [B, V]."""
        ...


class Decoding(Protocol):
    """Rows that an engine continues together. Each has keys and values in a common cache, and positions of its own.

    A row computes what it computes alone, but for rounding: the others and the padding between them make no difference.
    After an error of any method the rows are lost, and another Decoding begins with the same texts.
    """

    def enter(
        self, texts: Sequence[np.ndarray], text_of: Sequence[int] | None = None,
        *, adapters: Sequence[int] | None = None, caches: Sequence[GenerationCache | None] | None = None,
    ) -> NextLogits:  # fmt: skip
        """Add rows after those that are there, and return the logits after their texts (int32 [T], T >= 1).

        `text_of`: the index of each row's text, where several rows begin with the same one, which is computed once. By
        default each text is a row. `adapters`: where there is a bank, the number of each text's adapter in it, or
        NO_ADAPTER, which is the default. `caches`: of each text, the cache that `Engine.generate` or `hold` has filled
        with its adapter: if the engine can, keys and values of the tokens at its beginning that are there are copied,
        not computed. As many tokens of each text are computed as of the one with the most new ones.
        """
        ...

    def advance(self, tokens_B: np.ndarray) -> NextLogits:
        """Append a token to each row (int32 [B]), and return the logits after it."""
        ...

    def hold(self, row: int, text: np.ndarray, cache: GenerationCache) -> None:
        """Let an empty cache hold a copy of the keys and values of a row, as `Engine.generate` would, if it can.

        `text`: the tokens of the row (int32 [T]); the last one may not be computed yet.
        """
        ...

    def leave(self, staying: Sequence[int]) -> None:
        """Keep only these rows, given by their present indices, in this order.

        Memory of the others is freed, at the latest when they are as many as the rows that stay.
        """
        ...
