"""The base model of several engines, one after another: it is loaded once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

Base = TypeVar("Base")


class SharedBase:
    """Keeps the base model of an engine for the next one. One engine at a time; each frees what it adds to the base."""

    def __init__(self) -> None:
        self.num_loaded = 0
        self._key: Hashable = None
        self._base: Any = None

    def get(self, key: Hashable, load: Callable[[], Base]) -> Base:
        """Return what `load` returns, without calling it if it has returned this before. None as a key keeps nothing.

        What was kept for another key is freed first, so that there is never room needed for two.
        """
        gc.collect()  # an engine is part of reference cycles
        if key is None or key != self._key:
            self._key = self._base = None
            gc.collect()
            base = load()
            self.num_loaded += 1
            if key is None:
                return base
            self._key, self._base = key, base
        return cast(Base, self._base)
