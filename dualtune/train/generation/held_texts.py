"""What an engine has computed of texts, kept for those that begin alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from dualtune.engine.decoding import GenerationCache

MOST_TEXTS = 64  # which a new one is compared with


class HeldTexts:
    """The caches of the texts that were read last, each by a model with a name; their tokens are limited together.

    The text that was asked for longest ago leaves first; of each model the last one stays, however long it is.
    """

    def __init__(self, most_tokens: int = 0) -> None:
        self.most_tokens = most_tokens
        self._held = list[tuple[str, GenerationCache]]()  # the last one that was asked for at the end

    @property
    def num_tokens(self) -> int:
        return sum(len(cache.tokens) for _, cache in self._held)

    def longest(self, name: str, text: np.ndarray) -> GenerationCache | None:
        """Return the cache of a model with most of the beginning of a text (int32 [T]); None if none has any."""
        own = [each for each in self._held if each[0] == name]
        shared, _, best = max(((each[1].num_shared(text), i, each) for i, each in enumerate(own)), default=(0, 0, None))
        if not shared or best is None:
            return None
        self._held.remove(best)
        self._held.append(best)
        return best[1]

    def begun(self, name: str, text: np.ndarray) -> GenerationCache:
        """Return the cache that a model continues a text with, by itself: the longest one, or a new one."""
        cache = self.longest(name, text)
        if cache is None:
            cache = GenerationCache()
            self.put(name, cache)
        return cache

    def put(self, name: str, cache: GenerationCache) -> None:
        """Keep a cache, in place of those of the same model that hold only its beginning."""
        tokens = cache.tokens
        self._held = [
            (own, each) for own, each in self._held if own != name or each.tokens != tokens[: len(each.tokens)]
        ]
        self._held.append((name, cache))
        last = dict(self._held)  # of each model
        for each in [*self._held]:
            if self.num_tokens <= self.most_tokens and len(self._held) <= MOST_TEXTS:
                return
            if each[1] is not last[each[0]]:
                self._held.remove(each)

    def forget(self, name: str | None = None) -> None:
        """Hold nothing of a model; by default of none."""
        self._held = [each for each in self._held if name not in (None, each[0])]


class HeldConversations:
    """What was computed of conversations, by name, until each gets its next answer; their tokens are limited together.

    Those that end an answer first are held first, and the limit is no matter of free memory: what is held changes
    roundings, and a step that is repeated draws the same.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._held, self._asking = dict[str, GenerationCache](), list[tuple[str, bool]]()

    def go_on(self, asking: Mapping[str, bool]) -> None:
        """Let these get an answer, by their index from here on, and hold nothing of others. True: not its last."""
        self._asking = [*asking.items()]
        self._held = {name: cache for name, cache in self._held.items() if name in asking}

    def take(self, index: int) -> GenerationCache | None:
        """Return what is held of a conversation, which is held no more."""
        return self._held.pop(self._asking[index][0], None)

    def keeper(self, index: int) -> Callable[[GenerationCache], None] | None:
        """Return what keeps the cache of a conversation; None at its last answer."""
        name, goes_on = self._asking[index]
        return partial(self._put, name) if goes_on else None

    def _put(self, name: str, cache: GenerationCache) -> None:
        if sum(len(each.tokens) for each in self._held.values()) + len(cache.tokens) <= self.most_tokens:
            self._held[name] = cache

    def forget(self) -> None:
        self._held.clear()
