"""From the documents of a step to micro-batches: rows, in groups that fit, as arrays.

How documents are laid out in rows changes speed and memory, never the result: each sees only itself, and its dropout
keys are its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import Protocol

import numpy as np

from dualtune.backend import IGNORE_INDEX, Batch
from dualtune.data.tokens.store import Document

GRANULE = 16  # rows are padded to a multiple of it…
WIDTHS_PER_DOUBLING = 8  # …and long ones to a coarser one, so that few shapes occur
# Tokens that are worth a micro-batch, whose dispatch costs time however little it holds: a row that is shorter than the
# longest of its micro-batch by more opens a new one.
MOST_PADDING = 256

Row = list[int]  # the documents of a row


class HasDocuments(Protocol):
    """A sequence of documents whose lengths are known without reading them."""

    @property
    def lengths(self) -> np.ndarray: ...
    def __getitem__(self, index: int, /) -> Document: ...


@dataclass(frozen=True, slots=True)
class Layout:
    max_tokens: int  # of a micro-batch, padding included; a row that is longer has one for itself
    row_length: int | None = None  # several documents share a row of this many tokens; None: one document a row


def plan(lengths: np.ndarray, ids: Iterable[int], layout: Layout) -> list[list[Row]]:
    """The rows of each micro-batch. Longest first, so that an out-of-memory shows at once."""
    by_length = sorted(ids, key=lambda i: (-lengths[i], i))
    if layout.row_length is None:
        return grouped(lengths, [[i] for i in by_length], layout.max_tokens)
    full = pack(lengths, by_length, layout.row_length)
    even = level(lengths, by_length, len(full))
    ways = [full, even] if _width(lengths, even) <= layout.row_length else [full]
    plans = [grouped(lengths, rows, layout.max_tokens) for rows in ways]
    return min(plans, key=lambda groups: _cells(lengths, groups) + MOST_PADDING * len(groups))


def share(lengths: np.ndarray, ids: Iterable[int], layout: Layout, rank: int, size: int) -> list[list[Row]]:
    """The micro-batches that process `rank` of `size` computes; all have equally many.

    Longest rows first, each to the process that has the fewest tokens. One that has a micro-batch less than others has
    empty ones at the end.
    """
    if size == 1:
        return plan(lengths, ids, layout)
    rows = _rows_for(lengths, sorted(ids, key=lambda i: (-lengths[i], i)), layout.row_length, size)
    used = [_used(lengths, row) for row in rows]
    order = sorted(range(len(rows)), key=lambda r: -used[r])
    parts = [[order[r] for r in part] for part in level(np.array(used)[order], range(len(rows)), size)]
    groups = [grouped(lengths, [rows[r] for r in part], layout.max_tokens) for part in parts]
    return groups[rank] + [[] for _ in range(max(map(len, groups)) - len(groups[rank]))]


def _rows_for(lengths: np.ndarray, by_length: list[int], row_length: int | None, size: int) -> list[Row]:
    """Rows for several processes: even ones, as many for each, where packing leaves the choice."""
    if row_length is None:
        return [[i] for i in by_length]
    full = pack(lengths, by_length, row_length)
    even = level(lengths, by_length, min(-(-len(full) // size) * size, len(by_length)))
    return even if _width(lengths, even) <= row_length else full


def grouped(lengths: np.ndarray, rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """The rows, longest first, in micro-batches that fit."""
    used = [_used(lengths, row) for row in rows]
    groups: list[list[Row]] = []
    width = longest = 0
    for r in sorted(range(len(rows)), key=lambda r: -used[r]):
        if groups and (len(groups[-1]) + 1) * width <= max_tokens and longest - used[r] <= MOST_PADDING:
            groups[-1].append(rows[r])
        else:
            groups.append([rows[r]])
            width, longest = padded(used[r]), used[r]
    return groups


def pack(lengths: np.ndarray, by_length: Sequence[int], row_length: int) -> list[Row]:
    """Best-fit decreasing: each document, longest first, into the fullest row that still has room for it.

    Johnson et al., Worst-case performance bounds for simple one-dimensional packing algorithms, 1974.
    """
    rows: list[Row] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for i in by_length:
        length = int(lengths[i])
        at = bisect_left(free, (length, -1))
        if at < len(free):
            room, row = free.pop(at)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(i)
        insort(free, (room - length, row))
    return rows


def level(lengths: np.ndarray, by_length: Sequence[int], num_rows: int) -> list[Row]:
    """Rows of about the same length: each document, longest first, into the shortest row.

    Graham, Bounds on multiprocessing timing anomalies, 1969. Rows may come out longer than those of `pack`.
    """
    rows = [(0, r, Row()) for r in range(num_rows)]
    for i in by_length:
        used, r, row = rows[0]
        row.append(i)
        heapreplace(rows, (used + int(lengths[i]), r, row))
    return [row for _, _, row in rows]


def padded(length: int) -> int:
    """The width of a row that holds so many tokens: one of at most eight widths for every doubling."""
    granule = GRANULE
    while granule * WIDTHS_PER_DOUBLING * 2 < length:
        granule *= 2
    return -(-length // granule) * granule


def _used(lengths: np.ndarray, row: Row) -> int:
    """The tokens of a row."""
    return int(sum(lengths[i] for i in row))


def _width(lengths: np.ndarray, rows: Sequence[Row]) -> int:
    """The tokens of the longest row."""
    return max((_used(lengths, row) for row in rows), default=0)


def _cells(lengths: np.ndarray, groups: Sequence[Sequence[Row]]) -> int:
    """The tokens of all micro-batches, padding included."""
    return sum(len(rows) * padded(_width(lengths, rows)) for rows in groups)


def fill(lengths: np.ndarray, groups: Sequence[Sequence[Row]]) -> float:
    """The share of a plan's cells that hold a token."""
    used = sum(_used(lengths, row) for rows in groups for row in rows)
    return used / max(1, _cells(lengths, groups))


def micro_batches(
    documents: HasDocuments, ids: Iterable[int], layout: Layout, *, seed: int, step: int, rank: int = 0, size: int = 1
) -> list[Batch]:
    """The micro-batches of a step over the documents with these indices; of a process of several, its share."""
    groups = share(documents.lengths, ids, layout, rank, size)
    return [make_batch(documents, rows, seed=seed, step=step) for rows in groups]


def make_batch(documents: HasDocuments, rows: Sequence[Row], *, seed: int, step: int) -> Batch:
    """The micro-batch of these rows. Of none, one without targets: real tokens, so that nothing in it is NaN."""
    if not rows:
        shortest = make_batch(documents, [[int(np.argmin(documents.lengths))]], seed=seed, step=step)
        return replace(shortest, labels_BT=np.full_like(shortest.labels_BT, IGNORE_INDEX))
    shape = (len(rows), padded(_width(documents.lengths, rows)))
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    labels = np.full(shape, IGNORE_INDEX, np.int32)
    noise = np.zeros(shape, np.uint32)
    weights: np.ndarray | None = None  # as long as no document has some
    for b, row in enumerate(rows):
        end = 0
        for segment, id in enumerate(row, start=1):
            document = documents[id]
            length = len(document.tokens)
            start, end = end, end + length
            tokens[b, start:end] = document.tokens
            labels[b, start : end - 1] = np.where(document.trained[1:], document.tokens[1:], IGNORE_INDEX)
            segments[b, start:end] = segment
            positions[b, start:end] = np.arange(length)
            # Prefix-stable: the key of a position does not depend on the document's length or place in the batch.
            noise[b, start:end] = np.random.default_rng([seed, 2, step, id]).integers(0, 1 << 32, length, np.uint32)
            if document.weights is not None:
                weights = np.ones(shape, np.float32) if weights is None else weights
                weights[b, start : end - 1] = document.weights[1:]
    return Batch(tokens, labels, segments, positions, noise, weights)
