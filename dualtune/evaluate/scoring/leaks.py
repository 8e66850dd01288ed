"""Held-out rows that the training data also hold, exactly or nearly: such rows measure memory, not learning.

Rows are near duplicates if the sets of their shingles (5 characters in sequence, without case, runs of spaces as one)
have a Jaccard similarity of at least 0.8. Candidates are found by MinHash (Broder, On the resemblance and containment
of documents, 1997) in 16 bands of 4 hashes, which find a pair of similarity 0.8 with a probability of 0.9998, and are
then compared exactly. Only the held-out rows are kept in memory; the training data stream past. See decision 0040.
Shape suffixes: S shingles of a row, H hashes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dualtune import interrupt
from dualtune.data.chat.formats import Example

SHINGLE = 5  # characters
NEAR = 0.8  # Jaccard similarity
BANDS, HASHES_PER_BAND = 16, 4
CHUNK = 4096  # shingles hashed at once, 2 MB
_RNG = np.random.default_rng(0)
_FACTORS_H = _RNG.integers(0, 1 << 63, BANDS * HASHES_PER_BAND, np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS_H = _RNG.integers(0, 1 << 63, BANDS * HASHES_PER_BAND, np.uint64)
_POWERS = np.array([pow(0x9E3779B97F4A7C15, k, 1 << 64) for k in range(SHINGLE)], np.uint64)


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


def text_of(example: Example) -> str:
    """Return the text of a row, without its system message, which many rows share."""
    turns = [message.content for message in example.messages if message.role != "system"]
    return "\n".join(turns or [example.prompt or "", example.completion or ""])


def shingles(text: str) -> np.ndarray:
    """Return uint64 [S]: the hash of each shingle, sorted, without repetition. A shorter text is one shingle."""
    plain = " ".join(text.casefold().split())
    codes = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64) + np.uint64(1)
    codes = np.pad(codes, (0, max(0, SHINGLE - len(codes))))
    last = len(codes) - SHINGLE + 1
    return np.unique(sum(codes[k : k + last] * _POWERS[k] for k in range(SHINGLE)))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Return the size of the intersection of two sets by that of their union; both sorted, without repetition."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)


def _bands(shingles_S: np.ndarray) -> Iterator[bytes]:
    """Yield a key for each band: rows that share one are candidates."""
    least_H = np.full(len(_FACTORS_H), np.iinfo(np.uint64).max)
    for start in range(0, len(shingles_S), CHUNK):
        hashed_SH = shingles_S[start : start + CHUNK, None] * _FACTORS_H + _OFFSETS_H
        hashed_SH ^= hashed_SH >> np.uint64(32)
        np.minimum(least_H, hashed_SH.min(axis=0), out=least_H)
    for band, hashes in enumerate(least_H.reshape(BANDS, HASHES_PER_BAND)):
        yield bytes([band]) + hashes.tobytes()
