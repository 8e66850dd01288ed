"""Caches of keys and values that outlive a text, for the texts that begin alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from dualtune.engine.decoding import GenerationCache

MOST_TEXTS = 64  # which a new one is compared with


class TextCaches:
    """The caches of the latest texts, each of a model with a name; their tokens are limited together.

    The least recently used one leaves first; that of each model's latest text stays, however long it is.
    """

    def __init__(self, most_tokens: int = 0) -> None:
        self.most_tokens = most_tokens
        self._caches = list[tuple[str, GenerationCache]]()  # by their last use

    @property
    def num_tokens(self) -> int:
        return sum(len(cache.tokens) for _, cache in self._caches)

    def longest(self, name: str, text: np.ndarray) -> GenerationCache | None:
        """Return the cache of a model with the longest prefix of a text (int32 [T]); None if none has any of it."""
        own = [each for each in self._caches if each[0] == name]
        shared, _, best = max(((each[1].num_shared(text), i, each) for i, each in enumerate(own)), default=(0, 0, None))
        if not shared or best is None:
            return None
        self._caches.remove(best)
        self._caches.append(best)
        return best[1]

    def cache_for(self, name: str, text: np.ndarray) -> GenerationCache:
        """Return the cache with which a model continues a text alone: that of the longest prefix, or a new one."""
        cache = self.longest(name, text)
        if cache is None:
            cache = GenerationCache()
            self.put(name, cache)
        return cache

    def put(self, name: str, cache: GenerationCache) -> None:
        """Keep a cache, in place of those of the same model that hold only its beginning."""
        tokens = cache.tokens
        self._caches = [
            (own, each) for own, each in self._caches if own != name or each.tokens != tokens[: len(each.tokens)]
        ]
        self._caches.append((name, cache))
        last = dict(self._caches)  # of each model
        for each in [*self._caches]:
            if self.num_tokens <= self.most_tokens and len(self._caches) <= MOST_TEXTS:
                return
            if each[1] is not last[each[0]]:
                self._caches.remove(each)

    def forget(self, name: str | None = None) -> None:
        """Drop the caches of a model; by default those of all."""
        self._caches = [each for each in self._caches if name not in (None, each[0])]


class ConversationCaches:
    """The caches of conversations, by name, until each gets its next answer; their tokens are limited together.

    Those that end an answer first are cached first. The limit does not depend on free memory, because a cache changes
    roundings, and a step that is repeated must draw the same samples.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._caches, self._asking = dict[str, GenerationCache](), list[tuple[str, bool]]()

    def go_on(self, asking: Mapping[str, bool]) -> None:
        """Let these get an answer, by their index from here on, and drop the caches of others. True: not its last."""
        self._asking = [*asking.items()]
        self._caches = {name: cache for name, cache in self._caches.items() if name in asking}

    def take(self, index: int) -> GenerationCache | None:
        """Remove the cache of a conversation, and return it; None if there is none."""
        return self._caches.pop(self._asking[index][0], None)

    def keeper(self, index: int) -> Callable[[GenerationCache], None] | None:
        """Return the function that stores the cache of a conversation; None at its last answer."""
        name, goes_on = self._asking[index]
        return partial(self._put, name) if goes_on else None

    def _put(self, name: str, cache: GenerationCache) -> None:
        if sum(len(each.tokens) for each in self._caches.values()) + len(cache.tokens) <= self.most_tokens:
            self._caches[name] = cache

    def forget(self) -> None:
        self._caches.clear()
