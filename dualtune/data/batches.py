"""Convert the documents of a step to micro-batches: lay them out in rows, group the rows, and build arrays.

The sequence layout changes speed and memory, never the result: each document sees only itself and has its own dropout
keys.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from heapq import heapreplace
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np

from dualtune.data.tokens.store import HiddenStates
from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.engine.memory.estimate import padded
from dualtune.engine.step_time import StepDocuments

if TYPE_CHECKING:
    from dualtune.data.documents import Documents

# The fixed cost of a micro-batch, in tokens. A row that is shorter than the longest of its micro-batch by more starts a
# new micro-batch.
MOST_PADDING = 256

Row = list[int]  # indices of the documents in a row


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    max_tokens: int  # of a micro-batch, padding included; a longer row is a micro-batch by itself
    row_length: int | None = None  # documents share rows of this many tokens (packing); None: one document per row

    def cut_to(self, max_tokens: int) -> SequenceLayout:
        """Return the layout with smaller micro-batches. Rows that documents share become no longer than these."""
        return SequenceLayout(max_tokens, self.row_length and min(self.row_length, max_tokens))

    def halved(self, tokens: int, longest: int) -> SequenceLayout | None:
        """Return a layout in which a micro-batch of `tokens` is cut in halves; None if none is smaller than this one.

        No document is cut, so a micro-batch may always have as many tokens as the longest document.
        """
        half = max(min(tokens, self.max_tokens) // 2, longest)
        return self.cut_to(half) if half < self.max_tokens else None


def plan(lengths: np.ndarray, ids: Iterable[int], layout: SequenceLayout) -> list[list[Row]]:
    """Return the rows of each micro-batch, longest first, so that an out-of-memory error occurs at once."""
    by_length = sorted(ids, key=lambda i: (-lengths[i], i))
    if layout.row_length is None:
        return grouped(lengths, [[i] for i in by_length], layout.max_tokens)
    # Full rows waste the least cells, even rows need fewer micro-batches where the last full one is short.
    full = pack(lengths, by_length, layout.row_length)
    even = level(lengths, by_length, len(full))
    ways = [full, even] if _width(lengths, even) <= layout.row_length else [full]
    plans = [grouped(lengths, rows, layout.max_tokens) for rows in ways]
    return min(plans, key=lambda groups: _cells(lengths, groups) + MOST_PADDING * len(groups))


def share(lengths: np.ndarray, ids: Iterable[int], layout: SequenceLayout, rank: int, size: int) -> list[list[Row]]:
    """Return the micro-batches of process `rank` of `size`; all processes have the same number.

    Each row, longest first, goes to the process with the fewest tokens. A process with fewer micro-batches than others
    gets empty ones at the end.
    """
    if size == 1:
        return plan(lengths, ids, layout)
    by_length = sorted(ids, key=lambda i: (-lengths[i], i))
    rows = [[i] for i in by_length]
    if layout.row_length is not None:  # rows of similar length, equally many for each process if possible
        full = pack(lengths, by_length, layout.row_length)
        even = level(lengths, by_length, min(-(-len(full) // size) * size, len(by_length)))
        rows = even if _width(lengths, even) <= layout.row_length else full
    used = [_used(lengths, row) for row in rows]
    order = sorted(range(len(rows)), key=lambda r: -used[r])
    parts = [[order[r] for r in part] for part in level(np.array(used)[order], range(len(rows)), size)]
    groups = [grouped(lengths, [rows[r] for r in part], layout.max_tokens) for part in parts]
    return groups[rank] + [[] for _ in range(max(map(len, groups)) - len(groups[rank]))]


def grouped(lengths: np.ndarray, rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Group the rows, longest first, into micro-batches of at most `max_tokens`."""
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
    """Pack by best-fit decreasing: each document, longest first, goes into the fullest row with room for it.

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
    """Build rows of similar length: each document, longest first, goes into the shortest row.

    Graham, Bounds on multiprocessing timing anomalies, 1969. Rows may be longer than those of `pack`.
    """
    rows = [(0, r, Row()) for r in range(num_rows)]
    for i in by_length:
        used, r, row = rows[0]
        row.append(i)
        heapreplace(rows, (used + int(lengths[i]), r, row))
    return [row for _, _, row in rows]


def _used(lengths: np.ndarray, row: Row) -> int:
    """Return the number of tokens of a row."""
    return int(sum(lengths[i] for i in row))


def _width(lengths: np.ndarray, rows: Sequence[Row]) -> int:
    """Return the number of tokens of the longest row."""
    return max((_used(lengths, row) for row in rows), default=0)


def _cells(lengths: np.ndarray, groups: Sequence[Sequence[Row]]) -> int:
    """Return the number of cells of all micro-batches, padding included."""
    return sum(len(rows) * padded(_width(lengths, rows)) for rows in groups)


def fill(lengths: np.ndarray, groups: Sequence[Sequence[Row]]) -> float:
    """Return the share of a plan's cells that contain a token."""
    used = sum(_used(lengths, row) for rows in groups for row in rows)
    return used / max(1, _cells(lengths, groups))


def micro_batches(
    documents: Documents,
    ids: Iterable[int],
    layout: SequenceLayout,
    *,
    seed: int,
    step: int,
    rank: int = 0,
    size: int = 1,
) -> list[Batch]:
    """Build the micro-batches of a step for the documents with these indices; of several processes, `rank`'s share."""
    groups = share(documents.lengths, ids, layout, rank, size)
    return [make_batch(documents, rows, seed=seed, step=step) for rows in groups]


def make_batch(documents: Documents, rows: Sequence[Row], *, seed: int, step: int) -> Batch:
    """Build a micro-batch. Without rows it has no targets, but real tokens, so that nothing becomes NaN."""
    if not rows:
        shortest = make_batch(documents, [[int(np.argmin(documents.lengths))]], seed=seed, step=step)
        return replace(shortest, labels_BT=np.full_like(shortest.labels_BT, IGNORE_INDEX), documents=())
    shape = (len(rows), padded(_width(documents.lengths, rows)))
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    labels = np.full(shape, IGNORE_INDEX, np.int32)
    seeds = np.zeros(shape, np.uint32)
    weights: np.ndarray | None = None  # until a document has weights
    for b, row in enumerate(rows):
        end = 0
        for segment, id in enumerate(row, start=1):
            document = documents[id]
            length = len(document.tokens)
            start, end = end, end + length
            tokens[b, start:end] = document.tokens
            labels[b, start : end - 1] = np.where(document.loss_mask[1:], document.tokens[1:], IGNORE_INDEX)
            segments[b, start:end] = segment
            positions[b, start:end] = np.arange(length)
            # Prefix-stable: a position's key does not depend on the document's length or its place in the batch.
            seeds[b, start:end] = np.random.default_rng([seed, 2, step, id]).integers(0, 1 << 32, length, np.uint32)
            if document.weights is not None:
                weights = np.ones(shape, np.float32) if weights is None else weights
                weights[b, start : end - 1] = document.weights[1:]
    hidden = None if documents.hidden is None else _hidden(documents.hidden, rows, shape)
    return Batch(tokens, labels, segments, positions, seeds, weights, hidden, tuple(map(tuple, rows)))


def _hidden(states: HiddenStates, rows: Sequence[Row], shape: tuple[int, int]) -> np.ndarray:
    """Return the hidden states of the rows, [B, T, D], 0 for padding."""
    like = states[rows[0][0]]
    hidden_BTD = np.zeros((*shape, like.shape[-1]), like.dtype)
    for b, row in enumerate(rows):
        end = 0
        for id in row:
            states_TD = states[id]
            start, end = end, end + len(states_TD)
            hidden_BTD[b, start:end] = states_TD
    return hidden_BTD


# ----------------------------------------------------------------------------------------------------------------------
# Prepare the next step's micro-batches in a thread while the current step runs.

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """Prefetch one step ahead: `self(step)` returns `make(step)`, which is a pure function until `drop` is called.

    A call for any other step than the next one is also correct, but not prefetched.
    """

    def __init__(self, make: Callable[[int], Result], end: int) -> None:
        self._make, self._end = make, end
        self._pool = ThreadPoolExecutor(1, "dualtune-prefetch")
        self._coming: tuple[int, Future[Result]] | None = None

    def __call__(self, step: int) -> Result:
        coming, self._coming = self._coming, None
        result = coming[1].result() if coming and coming[0] == step else self._make(step)
        if step + 1 < self._end:
            self._coming = step + 1, self._pool.submit(self._make, step + 1)
        return result

    def drop(self) -> None:
        """Forget what was prefetched, because `make` gives another result now."""
        self._coming = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def step_documents(
    lengths: np.ndarray, layout: SequenceLayout, source: str, target_share: float = 1.0
) -> StepDocuments:
    """Lay the documents of a step out as training does, to predict its time. `source`: where the lengths come from."""
    groups = plan(lengths, range(len(lengths)), layout)
    rows = tuple(tuple(tuple(int(lengths[i]) for i in row) for row in group) for group in groups)
    return StepDocuments(lengths, rows, target_share, source)
