"""The documents of a step, as far as the time of the step depends on them: how they lie in micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dualtune.data.batching.batches import SequenceLayout, padded, plan


@dataclass(frozen=True)
class StepDocuments:
    """The documents of one optimizer step, in micro-batches of rows."""

    lengths: np.ndarray  # tokens, int [documents]
    rows: tuple[tuple[tuple[int, ...], ...], ...]  # micro-batch -> row -> lengths of its documents in tokens
    target_share: float  # how many of the tokens are targets
    source: str  # where the lengths come from

    @classmethod
    def of(cls, lengths: np.ndarray, layout: SequenceLayout, source: str, target_share: float = 1.0) -> StepDocuments:
        """Lay the documents out as training does."""
        groups = plan(lengths, range(len(lengths)), layout)
        rows = tuple(tuple(tuple(int(lengths[i]) for i in row) for row in group) for group in groups)
        return cls(lengths, rows, target_share, source)

    @property
    def tokens(self) -> int:
        """Tokens of documents, without padding."""
        return int(self.lengths.sum())

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The padded length of the rows of each micro-batch, in tokens."""
        return tuple(padded(max(map(sum, group))) for group in self.rows)

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """The tokens that each micro-batch computes, padding included."""
        return tuple(len(group) * width for group, width in zip(self.rows, self.widths, strict=True))

    @property
    def targets(self) -> tuple[int, ...]:
        """The targets of each micro-batch: the first token of a document is none."""
        return tuple(
            round(self.target_share * sum(length - 1 for row in group for length in row)) for group in self.rows
        )

    @property
    def seen(self) -> int:
        """The number of pairs of a token and one that it sees, itself included."""
        return int((self.lengths * (self.lengths + 1) // 2).sum())
