"""Held-out rows that the training data also hold, exactly or nearly: such rows measure memory, not learning.

Rows are near duplicates if the sets of their shingles have a Jaccard similarity of at least 0.8. Candidates are found
by their sketches in 16 bands of 4 hashes, which find a pair of similarity 0.8 with a probability of 0.9998, and are
then compared exactly. Only the held-out rows are kept in memory; the training data stream past. See decision 0040.
Shape suffix: S shingles of a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dualtune import interrupt
from dualtune.data.chat.formats import Example
from dualtune.data.similarity.shingles import NEAR, jaccard, shingles, sketch, text_of

HASHES_PER_BAND = 4


@dataclass(frozen=True, slots=True)
class Leaks:
    """How many of the held-out rows are in the training data. A row counts once: as exact if it is both."""

    rows: int
    exact: int
    near: int
    first: tuple[str, str] | None  # path:line of the first such held-out row, and of the training row


def find_leaks(
    held_out: Sequence[Example], training: Iterable[Example], show: Callable[[int], None] = lambda done: None
) -> Leaks:
    """Compare each training row with the held-out rows. `show` is told how many training rows have been read."""
    index = _HeldOut(held_out)
    for done, example in enumerate(training, start=1):
        interrupt.poll()
        show(done)
        index.look_up(example)
    leaked = index.near | index.exact
    first = min(leaked, default=None)
    pair = None if first is None else (held_out[first].where, leaked[first])
    return Leaks(len(held_out), len(index.exact), len(leaked) - len(index.exact), pair)


class _HeldOut:
    """The held-out rows by text and by band, and which of them training rows have matched: index -> path:line."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.exact: dict[int, str] = {}
        self.near: dict[int, str] = {}
        self._by_text: dict[str, list[int]] = defaultdict(list)
        self._by_band: dict[bytes, list[int]] = defaultdict(list)
        self._sets = [shingles(text_of(example)) for example in examples]
        self._known = np.unique(np.concatenate(self._sets)) if self._sets else np.zeros(0, np.uint64)
        for i, example in enumerate(examples):
            self._by_text[text_of(example)].append(i)
            for band in _bands(self._sets[i]):
                self._by_band[band].append(i)

    def look_up(self, example: Example) -> None:
        text = text_of(example)
        for i in self._by_text.get(text, ()):
            self.exact.setdefault(i, example.where)
        found = shingles(text)
        # A row that is near to one of these shares at least that part of its own shingles with it.
        if not len(self._known) or _share_in(found, self._known) < NEAR:
            return
        for i in {i for band in _bands(found) for i in self._by_band.get(band, ())} - self.near.keys():
            if jaccard(found, self._sets[i]) >= NEAR:
                self.near[i] = example.where


def _share_in(some: np.ndarray, known: np.ndarray) -> float:
    """Return which share of a set is in another; both sorted."""
    at = np.minimum(np.searchsorted(known, some), len(known) - 1)
    return float((known[at] == some).mean())


def _bands(shingles_S: np.ndarray) -> Iterator[bytes]:
    """Yield a key for each band: rows that share one are candidates."""
    for band, hashes in enumerate(sketch(shingles_S).reshape(-1, HASHES_PER_BAND)):
        yield bytes([band]) + hashes.tobytes()
