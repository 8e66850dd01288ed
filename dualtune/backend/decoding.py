"""Several texts continued together: what an engine computes for them, one token of each row at a time.

Which token comes next is decided in the core (`evaluate/batched.py`), and so is when a row enters or leaves.
Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class CannotBatch(Exception):
    """The cache of this model cannot hold several rows. The text says why, for people."""


class NextLogits(Protocol):
    """The logits of the next token of each row, still on the device: only what is read is transferred."""

    def most_probable(self, *, is_last: bool = False) -> np.ndarray:
        """Return the most probable token of each row, the first of equals, int32 [B].

        Unless they are the last ones, an engine may compute the step after them ahead, in case `advance` gets them.
        """
        ...

    def rows(self) -> np.ndarray:
        """Return all logits, float32 [B, V]."""
        ...


class Decoding(Protocol):
    """Rows that an engine continues together. Each has keys and values in a common cache, and positions of its own.

    A row computes what it computes alone, but for rounding: the others and the padding between them make no difference.
    After an error of any method the rows are lost, and another Decoding begins with the same texts.
    """

    def enter(self, texts: Sequence[np.ndarray]) -> NextLogits:
        """Add rows after those that are there, and return the logits after their texts (int32 [T], T >= 1)."""
        ...

    def advance(self, tokens_B: np.ndarray) -> NextLogits:
        """Append a token to each row (int32 [B]), and return the logits after it."""
        ...

    def leave(self, staying: Sequence[int]) -> None:
        """Keep only these rows, given by their present indices, in this order.

        Memory of the others is freed, at the latest when they are as many as the rows that stay.
        """
        ...
