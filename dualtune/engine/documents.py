"""Where the documents of packed rows lie: those that share their beginning, and those of layers with a state.

Linear attention, state-space layers and short convolutions carry what they have read from token to token, and no mask
or position stops it at the border of a document. An engine computes such a layer in a few calls, whose rows are
documents of similar length, so that padding at most doubles the tokens. Each document then has exactly the numbers that
it has alone, whatever kernels the layer calls.

Legend: B rows, T tokens of a row; within a call N documents, L tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dualtune.engine.backend import Batch

Span = tuple[int, int, int]  # row, first token, end
SHORTEST = 16  # tokens: shorter documents share a call
ALIKE = 0.8  # the least length of a document in a batch, by that of the longest


class DocumentRows(NamedTuple):
    """Where the tokens of documents are found, and put back, in the flattened rows."""

    calls: list[np.ndarray]  # int64 [N, L] each: flat indices of tokens; the last token of a document is repeated
    back: np.ndarray  # int64 [B · T]: indices in the concatenated, flattened outputs of the calls; padding takes any


def spans_of(positions_BT: np.ndarray) -> Iterator[Span]:
    """Yield the documents in rows: one begins wherever the position is not that of the token before plus one."""
    for row, positions_T in enumerate(positions_BT):
        starts = [0, *(np.flatnonzero(np.diff(positions_T) != 1) + 1).tolist(), len(positions_T)]
        yield from ((row, start, end) for start, end in pairwise(starts))


class Branch(NamedTuple):
    """A document without the beginning that it shares with its parent, another document of its row."""

    row: int
    start: int  # its first token in the row
    end: int
    origin: int  # the parent's first token in the row
    shared: int  # how many of the parent's tokens it sees


def branches_of(batch: Batch) -> list[Branch]:
    """Return the documents of a micro-batch that have a parent, in the order of rows and tokens."""
    if batch.parents_BT is None:
        return []
    branches: list[Branch] = []
    for row in np.flatnonzero(batch.parents_BT.any(1)).tolist():
        segments_T, parents_T = batch.segments_BT[row], batch.parents_BT[row]
        borders = [0, *(np.flatnonzero(np.diff(segments_T)) + 1).tolist(), len(segments_T)]
        for start, end in pairwise(borders):
            if parents_T[start]:
                origin = int(np.flatnonzero(segments_T == parents_T[start])[0])
                branches.append(Branch(row, start, end, origin, int(batch.positions_BT[row, start])))
    return branches


def shared_tokens(batch: Batch) -> np.ndarray:
    """Return how many tokens of its document's parent each token sees, int32 [B, T]."""
    shared_BT = np.zeros_like(batch.segments_BT)
    for branch in branches_of(batch):
        shared_BT[branch.row, branch.start : branch.end] = branch.shared
    return shared_BT


def document_rows(spans: Iterable[Span], shape: tuple[int, int]) -> DocumentRows | None:
    """Return how documents in rows of `shape` (B, T) become rows; None if each row is one document."""
    B, T = shape
    by_size: dict[int, list[Span]] = {}
    for span in spans:
        size = max(SHORTEST, 1 << (span[2] - span[1] - 1).bit_length())
        by_size.setdefault(size, []).append(span)
    if not any(start for group in by_size.values() for _, start, _ in group):
        return None
    calls: list[np.ndarray] = []
    back, num_before = np.zeros(B * T, np.int64), 0
    for _, group in sorted(by_size.items()):
        call_NL, is_token_NL = one_a_row(group, T, max(end - start for _, start, end in group))
        back[call_NL[is_token_NL]] = num_before + np.flatnonzero(is_token_NL)
        calls.append(call_NL)
        num_before += call_NL.size
    return DocumentRows(calls, back)


def one_a_row(spans: Iterable[Span], T: int, L: int) -> tuple[np.ndarray, np.ndarray]:
    """Return documents of up to L tokens, one a row: the flat index of each token, int64 [N, L], and which are its own.

    The last token of a document is repeated.
    """
    pairs_2N = np.array([(row * T + start, end - start) for row, start, end in spans], np.int64).T
    first_N1, lengths_N1 = pairs_2N[..., None]
    steps_L = np.arange(L, dtype=np.int64)
    return first_N1 + np.minimum(steps_L, lengths_N1 - 1), steps_L < lengths_N1


def alike(lengths: Sequence[int], short: int, block: int) -> Iterator[list[int]]:
    """Yield the numbers of documents of up to `short` tokens and similar lengths, which are computed as one batch.

    At most so many that the batch, padded to its longest document, has the scores of a square block. What is similar to
    no other one is in none.
    """
    left = sorted((i for i, length in enumerate(lengths) if length <= short), key=lambda i: -lengths[i])
    while left:
        longest = lengths[left[0]]
        batch = [i for i in left[: block**2 // longest**2] if lengths[i] >= ALIKE * longest]
        left = left[len(batch) :]
        if len(batch) > 1:
            yield batch
