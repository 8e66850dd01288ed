"""The cache of a generation: keys and values of a text, for a next prompt that begins with the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class GenerationCache:
    """What an engine keeps between two calls of `generate`. It belongs to one engine with one adapter."""

    tokens: list[int] = field(default_factory=list[int])  # whose keys and values it holds
    on_device: Any = None  # the backend's own; None: nothing is held

    def num_shared(self, prompt: np.ndarray) -> int:
        """Return how many tokens at the start of a prompt (int32 [T]) it holds: T - 1 at most.

        The last one is always computed, because its logits are needed.
        """
        length = min(len(self.tokens), len(prompt) - 1)
        differs = np.flatnonzero(np.asarray(self.tokens[:length], prompt.dtype) != prompt[:length])
        return int(differs[0]) if differs.size else length

    def take(self) -> Any:
        """Return the backend's part and hold nothing: an interrupted forward pass leaves no half of a token."""
        held, self.on_device = self.on_device, None
        return held

    def clear(self) -> None:
        """Hold nothing, such as after the adapter has changed."""
        self.tokens, self.on_device = [], None
