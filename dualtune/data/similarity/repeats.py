"""Which rows of a stream repeat another one, exactly or nearly. Decision 0046 has the reasons.

Rows are added one by one. Of each, 16 bytes of a digest stay in memory and, to find near duplicates, 268 bytes of a
sketch and the place of its text, which waits in a temporary file. Rows whose sketches share a band are candidates;
those that the sketches put far apart are skipped, and the others are compared exactly, so that a row that is left out
really is as similar as it is said to be. Shape suffixes: N rows, H hashes, B bands.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np

from dualtune import interrupt
from dualtune.data.chat.formats import Example
from dualtune.data.similarity.shingles import HASHES, digest_of, jaccard, shingles, sketch, text_of

Keep = Literal["first", "longest"]
LOWEST = 0.7  # the least similarity that is found reliably
# How much lower than the threshold the estimate of a sketch may be: at least four standard deviations.
SLACK = 0.25
_MIX = np.random.default_rng(1).integers(0, 1 << 63, HASHES, np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Why a row is left out: it repeats row `of`, which is kept."""

    of: int
    similarity: float  # Jaccard similarity of the texts
    is_exact: bool  # the same conversation, not only a text of similarity 1


class Repeats:
    """The rows of a stream, numbered from 0, and which of them repeat another one; used in a `with` block."""

    def __init__(self, near: float | None, scratch: Path | None = None) -> None:
        """`near`: the least similarity of near duplicates, in [LOWEST, 1]; None: only exact ones are found.

        `scratch` is the directory of the temporary file, None: that of the system.
        """
        self._near = near
        # Of 64 hashes: 16 bands of 4, or 21 of 3. They miss one in 5000 pairs of similarity 0.8, in 6500 of 0.7.
        self._per_band = 4 if near is not None and near >= 0.8 else 3
        self._digests, self._sketches = bytearray(), bytearray()
        self._num_shingles, self._ends = array("i"), array("q")
        self._texts: BinaryIO | None = None if near is None else tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115

    def __enter__(self) -> Repeats:
        return self

    def __exit__(self, *error: object) -> None:
        if self._texts is not None:
            self._texts.close()

    def __len__(self) -> int:
        return len(self._digests) // 16

    def add(self, example: Example) -> None:
        """Add the next row. Raises OSError if the temporary file cannot be written."""
        self._digests += digest_of(example)
        if self._texts is None:
            return
        text = text_of(example)
        found = shingles(text)
        self._sketches += sketch(found).astype(np.uint32).tobytes()
        self._num_shingles.append(len(found))
        size = self._texts.write(text.encode(errors="surrogatepass"))
        self._ends.append((self._ends[-1] if self._ends else 0) + size)

    def find(self, keep: Keep = "first", protected: int = 0) -> dict[int, Repeat]:
        """Return the rows to leave out. No row is added after that.

        Of rows that repeat each other the first is kept, or the longest. The first `protected` rows are always kept.
        """
        equal = _first_equal(np.frombuffer(self._digests, "V16"))
        again = [row for row in np.flatnonzero(equal != np.arange(len(equal))).tolist() if row >= protected]
        near = {} if self._near is None else self._near_ones(set(again), keep, protected)
        found = dict(near)
        for row in again:
            first = int(equal[row])
            found[row] = near[first] if first in near else Repeat(first, 1.0, is_exact=True)
        return found

    def _near_ones(self, again: set[int], keep: Keep, protected: int) -> dict[int, Repeat]:
        """Return the near duplicates among the rows that are not exact duplicates."""
        index = _Kept(self._sketch_of_rows, self._per_band)
        rows: list[int] = [row for row in index.rows.tolist() if row not in again]
        if keep == "longest":
            lengths = np.diff(np.frombuffer(self._ends, np.int64), prepend=0)
            rows.sort(key=lambda row: (row >= protected, -lengths[row]))  # stable: of equal ones the first
        found: dict[int, Repeat] = {}
        for row in rows:
            interrupt.poll()
            repeat = self._nearest(row, index.candidates(row)) if row >= protected else None
            if repeat is None:
                index.keep(row)
            else:
                found[row] = repeat
        return found

    def _nearest(self, row: int, others: Sequence[int]) -> Repeat | None:
        """Return the first of these rows that is near, in the order of what the sketches say."""
        if not others:
            return None
        assert self._near is not None
        ids, sizes = np.array(others), np.frombuffer(self._num_shingles, np.int32)
        smaller, larger = np.minimum(sizes[ids], sizes[row]), np.maximum(sizes[ids], sizes[row])
        ids = ids[smaller >= self._near * larger]  # two sets cannot be more similar than their sizes
        estimates = (self._sketch_of_rows[ids] == self._sketch_of_rows[row]).mean(axis=1)
        order = np.argsort(-estimates, kind="stable")
        likely: list[int] = ids[order][estimates[order] >= self._near - SLACK].tolist()
        own = self._shingles(row) if likely else None
        for other in likely:
            similarity = jaccard(cast(np.ndarray, own), self._shingles(other))
            if similarity >= self._near:
                return Repeat(other, similarity, is_exact=False)
        return None

    @property
    def _sketch_of_rows(self) -> np.ndarray:
        """uint32 [N, H]"""
        return np.frombuffer(self._sketches, np.uint32).reshape(-1, HASHES)

    def _shingles(self, row: int) -> np.ndarray:
        assert self._texts is not None
        start = self._ends[row - 1] if row else 0
        self._texts.seek(start)
        return shingles(self._texts.read(self._ends[row] - start).decode(errors="surrogatepass"))


def _first_equal(digests: np.ndarray) -> np.ndarray:
    """Return int64 [N]: the first row with the digest of each."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    return first[inverse]


class _Kept:
    """The rows that are kept so far, by the buckets of their sketches: rows with the same hashes in a band share one.

    In arrays, because lists of Python take ten times as much: of each bucket the newest row, and of each row the one
    before it in each of its buckets.
    """

    def __init__(self, sketches_NH: np.ndarray, per_band: int) -> None:
        bands, num_buckets = HASHES // per_band, 0
        self._buckets_NB = np.full((len(sketches_NH), bands), -1, np.int32)  # -1: no other row is in it
        for band in range(bands):
            mine = sketches_NH[:, band * per_band : (band + 1) * per_band].astype(np.uint64)
            keys = (mine * _MIX[:per_band]).sum(axis=1, dtype=np.uint64)  # equal by chance: one candidate more
            _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
            is_shared = counts > 1
            numbers = np.where(is_shared, num_buckets - 1 + np.cumsum(is_shared), -1)
            self._buckets_NB[:, band] = numbers[inverse]
            num_buckets += int(is_shared.sum())
        self._newest = np.full(num_buckets, -1, np.int32)
        self._before_NB = np.full_like(self._buckets_NB, -1)

    @property
    def rows(self) -> np.ndarray:
        """The rows that share a bucket with another one; the others are near to none."""
        return np.flatnonzero((self._buckets_NB >= 0).any(axis=1))

    def keep(self, row: int) -> None:
        bands = np.flatnonzero(self._buckets_NB[row] >= 0)
        mine = self._buckets_NB[row, bands]
        self._before_NB[row, bands] = self._newest[mine]
        self._newest[mine] = row

    def candidates(self, row: int) -> list[int]:
        """Return the kept rows that share a bucket with this one, in their order."""
        found: set[int] = set()
        for band, bucket in enumerate(self._buckets_NB[row].tolist()):
            other = int(self._newest[bucket]) if bucket >= 0 else -1
            while other >= 0:
                found.add(other)
                other = int(self._before_NB[other, band])
        return sorted(found)
