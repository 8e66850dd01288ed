"""Convert the documents of a step to micro-batches: lay them out in rows, group the rows, and build arrays.

The sequence layout changes speed and memory, never the result: each document sees only itself and has its own dropout
keys. Answers to one prompt may share its tokens in a row: the first has them, and the others follow it without them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from heapq import heapreplace
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np

from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.engine.memory.estimate import GRANULE, padded
from dualtune.engine.step_time import StepDocuments

if TYPE_CHECKING:
    from dualtune.data.documents import Documents

# The fixed cost of a micro-batch, in tokens. A row that is shorter than the longest of its micro-batch by more starts a
# new micro-batch.
MOST_PADDING = 256

Row = list[int]  # indices of the documents in a row


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """How documents are laid out in micro-batches. It changes no number but the rounding (decision 0003)."""

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


@dataclass(frozen=True, slots=True)
class RowSizes:
    """How many tokens each document adds to its row."""

    lengths: np.ndarray  # int [documents]
    # Of each document, how many tokens at its beginning are those of the first answer of its unit, int [documents], 0
    # for a first answer; None: every document is computed whole.
    shared: np.ndarray | None = None

    def added(self, row: Row) -> list[int]:
        """Return the tokens that each document adds. Answers of a unit that follow each other share their beginning."""
        lengths = [int(self.lengths[i]) for i in row]
        if self.shared is not None:
            for place, (before, i) in enumerate(pairwise(row), start=1):
                lengths[place] -= int(self.shared[i]) * (before == i - 1)
        return lengths

    def of(self, row: Row) -> int:
        """Return the number of tokens of a row."""
        return sum(self.added(row))

    def units(self, ids: Iterable[int], max_tokens: int) -> list[Row]:
        """Return what stays together in a row: answers that share a beginning, if they fit into a micro-batch."""
        if self.shared is None:
            return [[i] for i in ids]
        units: list[Row] = []
        for i in ids:
            if self.shared[i] and units and units[-1][-1] == i - 1 and self.of([*units[-1], i]) <= max_tokens:
                units[-1].append(i)
            else:
                units.append([i])
        return units


def sizes_of(documents: Documents) -> RowSizes:
    """Return the sizes of documents, as the engine computes them."""
    return RowSizes(documents.lengths, documents.beginnings if documents.shares else None)


def plan(sizes: RowSizes, ids: Iterable[int], layout: SequenceLayout) -> list[list[Row]]:
    """Return the rows of each micro-batch, longest first, so that an out-of-memory error occurs at once."""
    units, lengths, by_length = _by_length(sizes, ids, layout)
    if layout.row_length is None:
        return _of_units(units, grouped(lengths, [[u] for u in by_length], layout.max_tokens))
    # Full rows waste the least cells, even rows need fewer micro-batches where the last full one is short.
    full = pack(lengths, by_length, layout.row_length)
    even = level(lengths, by_length, len(full))
    ways = [full, even] if _width(lengths, even) <= layout.row_length else [full]
    plans = [grouped(lengths, rows, layout.max_tokens) for rows in ways]
    best = min(plans, key=lambda groups: _cells(RowSizes(lengths), groups) + MOST_PADDING * len(groups))
    return _of_units(units, best)


def share(sizes: RowSizes, ids: Iterable[int], layout: SequenceLayout, rank: int, size: int) -> list[list[Row]]:
    """Return the micro-batches of process `rank` of `size`; all processes have the same number.

    Each row, longest first, goes to the process with the fewest tokens. A process with fewer micro-batches than others
    gets empty ones at the end.
    """
    if size == 1:
        return plan(sizes, ids, layout)
    units, lengths, by_length = _by_length(sizes, ids, layout)
    rows = [[u] for u in by_length]
    if layout.row_length is not None:  # rows of similar length, equally many for each process if possible
        full = pack(lengths, by_length, layout.row_length)
        even = level(lengths, by_length, min(-(-len(full) // size) * size, len(by_length)))
        rows = even if _width(lengths, even) <= layout.row_length else full
    used = [_used(lengths, row) for row in rows]
    order = sorted(range(len(rows)), key=lambda r: -used[r])
    parts = [[order[r] for r in part] for part in level(np.array(used)[order], range(len(rows)), size)]
    groups = [grouped(lengths, [rows[r] for r in part], layout.max_tokens) for part in parts]
    return _of_units(units, groups[rank]) + [[] for _ in range(max(map(len, groups)) - len(groups[rank]))]


def _by_length(sizes: RowSizes, ids: Iterable[int], layout: SequenceLayout) -> tuple[list[Row], np.ndarray, list[int]]:
    """Return what stays together, the tokens of each, and their places, longest first."""
    units = sizes.units(ids, layout.max_tokens)
    lengths = np.array([sizes.of(unit) for unit in units], np.int64)
    return units, lengths, sorted(range(len(units)), key=lambda u: (-lengths[u], units[u]))


def _of_units(units: Sequence[Row], groups: Sequence[Sequence[Row]]) -> list[list[Row]]:
    return [[[i for u in row for i in units[u]] for row in rows] for rows in groups]


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


def _cells(sizes: RowSizes, groups: Sequence[Sequence[Row]]) -> int:
    """Return the number of cells of all micro-batches, padding included."""
    return sum(len(rows) * padded(max(map(sizes.of, rows), default=0)) for rows in groups)


def fill(sizes: RowSizes, groups: Sequence[Sequence[Row]]) -> float:
    """Return the share of a plan's cells that contain a token."""
    used = sum(sizes.of(row) for rows in groups for row in rows)
    return used / max(1, _cells(sizes, groups))


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
    groups = share(sizes_of(documents), ids, layout, rank, size)
    return [make_batch(documents, rows, seed=seed, step=step) for rows in groups]


def make_batch(documents: Documents, rows: Sequence[Row], *, seed: int, step: int) -> Batch:
    """Build a micro-batch. Without rows it has no targets, but real tokens, so that nothing becomes NaN."""
    if not rows:
        shortest = make_batch(documents, [[int(np.argmin(documents.lengths))]], seed=seed, step=step)
        return replace(shortest, labels_BT=np.full_like(shortest.labels_BT, IGNORE_INDEX), documents=())
    sizes = sizes_of(documents)
    shape = (len(rows), padded(max(map(sizes.of, rows))))
    tokens, segments, positions, parents = (np.zeros(shape, np.int32) for _ in range(4))
    labels = np.full(shape, IGNORE_INDEX, np.int32)
    seeds = np.zeros(shape, np.uint32)
    weights: np.ndarray | None = None  # until a document has weights
    hidden: np.ndarray | None = None
    for b, row in enumerate(rows):
        end, parent = 0, 0
        for segment, (id, added) in enumerate(zip(row, sizes.added(row), strict=True), start=1):
            document = documents[id]
            length = len(document.tokens)
            start, end, shared = end, end + added, length - added
            tokens[b, start:end] = document.tokens[shared:]
            labels[b, start : end - 1] = np.where(document.loss_mask[1:], document.tokens[1:], IGNORE_INDEX)[shared:]
            segments[b, start:end] = segment
            positions[b, start:end] = np.arange(shared, length)
            parent = parent if shared else segment
            parents[b, start:end] = parent if shared else 0
            seeds[b, start:end] = _seeds(documents, id, length, seed, step)[shared:]
            if document.weights is not None:
                weights = np.ones(shape, np.float32) if weights is None else weights
                weights[b, start : end - 1] = document.weights[1 + shared :]
            if documents.hidden is not None:
                states_TD = documents.hidden[id]
                hidden = np.zeros((*shape, states_TD.shape[-1]), states_TD.dtype) if hidden is None else hidden
                hidden[b, start:end] = states_TD[shared:]
    return Batch(
        tokens, labels, segments, positions, seeds, weights, hidden, tuple(map(tuple, rows)),
        parents if parents.any() else None,
    )  # fmt: skip


def trimmed(batch: Batch) -> Batch:
    """Return the micro-batch without the columns that are padding in every row, except those up to a whole granule."""
    used = np.flatnonzero(batch.segments_BT.any(axis=0))
    width = -(-(int(used[-1]) + 1) // GRANULE) * GRANULE
    arrays = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return replace(batch, **{name: a[:, :width] for name, a in arrays if isinstance(a, np.ndarray)})


def _seeds(documents: Documents, id: int, length: int, seed: int, step: int) -> np.ndarray:
    """Return the dropout seeds of a document, uint32 [length].

    A position's seed does not depend on the document's length or its place in the batch. A beginning that the first
    answer of a unit has, too, has the seeds of that, whether it is computed once or twice.
    """

    def seeds_of(document: int, length: int) -> np.ndarray:
        return np.random.default_rng([seed, 2, step, document]).integers(0, 1 << 32, length, np.uint32)

    seeds_T = seeds_of(id, length)
    if documents.beginnings is not None and (shared := int(documents.beginnings[id])):
        seeds_T[:shared] = seeds_of(id - id % documents.answers, shared)
    return seeds_T


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
    lengths: np.ndarray, layout: SequenceLayout, source: str, target_share: float = 1.0,
    shared: np.ndarray | None = None,
) -> StepDocuments:  # fmt: skip
    """Lay the documents of a step out as training does, to predict its time.

    `source`: where the lengths come from. `shared`: of `RowSizes`.
    """
    sizes = RowSizes(lengths, shared)
    groups = plan(sizes, range(len(lengths)), layout)
    rows = tuple(tuple(tuple(sizes.added(row)) for row in group) for group in groups)
    return StepDocuments(lengths, rows, target_share, source, shared)
