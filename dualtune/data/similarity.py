"""Which rows of a stream repeat another one, exactly or nearly. Decision 0046 has the reasons.

Rows are added one by one. 16 bytes of a digest of each stay in memory and, to find near duplicates, 268 bytes of a
sketch, up to 450 more while rows are compared, and the place of its text, which waits in a temporary file. Rows whose
sketches share a band are candidates; those that the sketches put far apart are skipped, and the others are compared
exactly, so that a row that is left out really is as similar as reported. Rows of one template are all
candidates of each other: then all kept rows are looked through by their sketches at once, and only the most alike by a
larger sketch are compared exactly. Shape suffixes: N rows, H hashes, B bands, K kept rows.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np

from dualtune.base import interrupt
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example, answers, num_shared

# ----------------------------------------------------------------------------------------------------------------------
# The text of a row as a set of shingles, how similar two sets are, and sketches that find candidates among many.
#
# A shingle is 5 characters in sequence, without case, runs of spaces as one: it needs no idea of what a word is in any
# language. A sketch holds the least value of each of 64 hashes over a set: two sets share one with a probability that
# is their Jaccard similarity (Broder, On the resemblance and containment of documents, 1997). Shape suffixes: S
# shingles of a row, H hashes.

SHINGLE = 5  # characters
NEAR = 0.8  # Jaccard similarity
HASHES = 64
CHUNK = 4096  # shingles hashed at once, 2 MB
_RNG = np.random.default_rng(0)
_FACTORS_H = _RNG.integers(0, 1 << 63, HASHES, np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS_H = _RNG.integers(0, 1 << 63, HASHES, np.uint64)
# A larger sketch, for rows with so many candidates that 64 hashes do not order them well.
FINE_HASHES = 256
_FINE_FACTORS_H = _RNG.integers(0, 1 << 31, FINE_HASHES, np.uint32) * np.uint32(2) + np.uint32(1)
_FINE_OFFSETS_H = _RNG.integers(0, 1 << 32, FINE_HASHES, np.uint32)
_POWERS = np.array([pow(0x9E3779B97F4A7C15, k, 1 << 64) for k in range(SHINGLE)], np.uint64)


def text_of(example: Example) -> str:
    """Return the text of a row with its tool calls, but without its system message, which many rows share."""
    turns = [text_of_message(message) for message in example.messages if message.role != "system"]
    texts = turns or [example.prompt or "", example.completion or ""]
    if worse := example.rejected:
        texts += [
            text_of_message(message) for message in worse.messages[num_shared(example.messages, worse.messages) :]
        ]
    return "\n".join(texts)


def text_of_message(message: Message) -> str:
    extra = json.dumps(dict(message.extra), ensure_ascii=False, sort_keys=True) if message.extra else ""
    return f"{message.content}\n{extra}" if extra else message.content


def digest_of(example: Example) -> bytes:
    """Return 16 bytes that are equal for rows with the same conversation, in whatever format, key order or file.

    The conversation is every message with its role, loss weight and tool calls, and the tools; or else the plain text.
    Of a pair it is both conversations, of an unpaired preference also the label.
    """
    parts = [_conversation(answer) for answer in answers(example)]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).digest()


def _conversation(example: Example) -> list[Any]:
    plain = None if example.messages else [example.prompt, example.completion, example.is_text]
    return [[_parts(message) for message in example.messages], list(example.tools), plain, example.label]


def _parts(message: Message) -> list[Any]:
    return [message.role, message.content, message.train, message.weight, message.extra]


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


def sketch(shingles_S: np.ndarray) -> np.ndarray:
    """Return uint64 [H]: the least value of each hash over the set."""
    return _least(shingles_S, _FACTORS_H, _OFFSETS_H, np.uint64(32))


def fine_sketch(shingles_S: np.ndarray) -> np.ndarray:
    """Return uint8 [FINE_HASHES]: the low byte of the least value of each hash over the set.

    Unequal values share their low byte once in 256: two sets of similarity j agree in j + (1 - j) / 256 of the places
    (Li and König, b-Bit Minwise Hashing, 2010).
    """
    halves = (shingles_S ^ (shingles_S >> np.uint64(32))).astype(np.uint32)  # half as many bytes to go through
    blocks = [slice(start, start + HASHES) for start in range(0, FINE_HASHES, HASHES)]  # arrays that stay in the cache
    least = [_least(halves, _FINE_FACTORS_H[block], _FINE_OFFSETS_H[block], np.uint32(16)) for block in blocks]
    return np.concatenate(least).astype(np.uint8)


def _least(
    shingles_S: np.ndarray, factors_H: np.ndarray, offsets_H: np.ndarray, shift: np.unsignedinteger
) -> np.ndarray:
    least_H = np.full(len(factors_H), np.iinfo(factors_H.dtype).max, factors_H.dtype)
    for start in range(0, len(shingles_S), CHUNK):
        hashed_HS = np.multiply.outer(factors_H, shingles_S[start : start + CHUNK])
        hashed_HS += offsets_H[:, None]
        hashed_HS ^= hashed_HS >> shift
        np.minimum(least_H, hashed_HS.min(axis=1), out=least_H)
    return least_H


# ----------------------------------------------------------------------------------------------------------------------
# The rows of a stream, and which repeat another one.

Keep = Literal["first", "longest"]
LOWEST = 0.7  # the least similarity that is found reliably
# How much lower than the threshold the estimate of a sketch may be: at least four standard deviations.
SLACK = 0.25
FINE_SLACK = 0.08  # the same for the larger sketch
MOST_FINE, MOST_EXACT = 1024, 8  # how many candidates of a row are compared by the larger sketch, and exactly
CROWDED = 512  # rows in the buckets of one: from there on, all kept rows are asked
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
        self._fine, self._fine_places = bytearray(), np.empty(0, np.int32)  # the larger sketches, and where each is
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
        hashes = shingles(text)
        self._sketches += sketch(hashes).astype(np.uint32).tobytes()
        self._num_shingles.append(len(hashes))
        size = self._texts.write(text.encode(errors="surrogatepass"))
        self._ends.append((self._ends[-1] if self._ends else 0) + size)

    def find(self, keep: Keep = "first", protected: int = 0) -> dict[int, Repeat]:
        """Return the rows to leave out. No row is added after that.

        The first of rows that repeat each other is kept, or the longest. The first `protected` rows are always kept.
        """
        equal = first_equal(np.frombuffer(self._digests, "V16"))
        again = [row for row in np.flatnonzero(equal != np.arange(len(equal))).tolist() if row >= protected]
        near = {} if self._near is None else self._near_ones(set(again), keep, protected)
        repeats = dict(near)
        for row in again:
            first = int(equal[row])
            repeats[row] = near[first] if first in near else Repeat(first, 1.0, is_exact=True)
        return repeats

    def _near_ones(self, again: set[int], keep: Keep, protected: int) -> dict[int, Repeat]:
        """Return the near duplicates among the rows that are not exact duplicates."""
        index = _SketchIndex(self._sketch_of_rows, self._per_band, round((cast(float, self._near) - SLACK) * HASHES))
        rows: list[int] = [row for row in index.rows.tolist() if row not in again]
        if keep == "longest":
            lengths = np.diff(np.frombuffer(self._ends, np.int64), prepend=0)
            rows.sort(key=lambda row: (row >= protected, -lengths[row]))  # stable: of equal ones the first
        repeats: dict[int, Repeat] = {}
        for row in rows:
            interrupt.poll()
            repeat = self._nearest(row, *index.candidates(row)) if row >= protected else None
            if repeat is None:
                index.keep(row)
            else:
                repeats[row] = repeat
        return repeats

    def _most_alike(self, row: int, others: np.ndarray) -> np.ndarray:
        """Return the rows that the larger sketch puts nearest, at most MOST_EXACT, in order.

        So the time for a row has a bound. A near duplicate is missed if that many rows seem to be nearer to it, which
        takes thousands of rows of one template, and a duplicate that is hardly more similar than they are.
        """
        assert self._near is not None
        fine_KH = self._fine_sketches(others)
        bits = np.packbits(fine_KH == self._fine_sketches(np.array([row])), axis=1).view(np.uint64)
        estimates = np.bitwise_count(bits).sum(axis=1) / FINE_HASHES
        order = np.argsort(-estimates, kind="stable")[:MOST_EXACT]
        return others[order][estimates[order] >= self._near - FINE_SLACK]

    def _fine_sketches(self, rows: np.ndarray) -> np.ndarray:
        """Return the larger sketches, uint8 [rows, FINE_HASHES]. They are made when they are first needed."""
        if not len(self._fine_places):
            self._fine_places = np.full(len(self), -1, np.int32)
        for row in rows[self._fine_places[rows] < 0].tolist():
            self._fine_places[row] = len(self._fine) // FINE_HASHES
            self._fine += fine_sketch(self._shingles(row)).tobytes()
        return np.frombuffer(self._fine, np.uint8).reshape(-1, FINE_HASHES)[self._fine_places[rows]]

    def _nearest(self, row: int, ids: np.ndarray, similarities: np.ndarray | None) -> Repeat | None:
        """Return the first of these rows that is near, in the order of what the sketches say.

        `similarities`: estimates of their similarity, float [ids]; None: those of the sketches.
        """
        if not len(ids):
            return None
        assert self._near is not None
        sizes = np.frombuffer(self._num_shingles, np.int32)
        smaller, larger = np.minimum(sizes[ids], sizes[row]), np.maximum(sizes[ids], sizes[row])
        may_be = smaller >= self._near * larger  # two sets cannot be more similar than their sizes
        ids = ids[may_be]
        # From here on ever fewer rows are compared ever more exactly: by sketches, by larger ones, and at last as sets.
        if similarities is None:
            estimates = (self._sketch_of_rows[ids] == self._sketch_of_rows[row]).mean(axis=1)
        else:
            estimates = similarities[may_be]
        if len(ids) > MOST_FINE:
            most = np.sort(np.argpartition(-estimates, MOST_FINE)[:MOST_FINE])
            ids, estimates = ids[most], estimates[most]
        order = np.argsort(-estimates, kind="stable")
        likely = ids[order][estimates[order] >= self._near - SLACK]
        if len(likely) > MOST_EXACT:
            likely = self._most_alike(row, likely)
        own = self._shingles(row) if len(likely) else None
        for other in likely.tolist():
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


def first_equal(digests: np.ndarray) -> np.ndarray:
    """Return int64 [N]: the first index with the digest of each."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    return first[inverse]


class _SketchIndex:
    """The rows that are kept so far, by the buckets of their sketches: rows with the same hashes in a band share one.

    In arrays, because lists of Python take ten times as much: of each bucket the newest row, and of each row the one
    before it in each of its buckets. Rows of one template share most buckets. Walking through them would take a time
    that grows with the square of their number, so that of crowded buckets all kept rows are asked at once instead.
    """

    def __init__(self, sketches_NH: np.ndarray, per_band: int, least_equal: int) -> None:
        """`least_equal`: how many hashes a candidate from a crowded bucket shares at least."""
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
        self._sizes = np.zeros(num_buckets, np.int32)
        # The low bytes of the sketches of kept rows, whose equality is necessary for that of the hashes.
        self._low_NH, self._least_equal = sketches_NH.astype(np.uint8), least_equal
        self._low_HK: np.ndarray = np.empty((HASHES, 1024), np.uint8)
        self._ids_K: np.ndarray = np.empty(1024, np.int64)
        self._num_kept = 0

    @property
    def rows(self) -> np.ndarray:
        """The rows that share a bucket with another one; the others are near to none."""
        return np.flatnonzero((self._buckets_NB >= 0).any(axis=1))

    def keep(self, row: int) -> None:
        bands = np.flatnonzero(self._buckets_NB[row] >= 0)
        mine = self._buckets_NB[row, bands]
        self._before_NB[row, bands] = self._newest[mine]
        self._newest[mine] = row
        self._sizes[mine] += 1
        if self._num_kept == len(self._ids_K):
            self._low_HK = np.concatenate([self._low_HK, np.empty_like(self._low_HK)], axis=1)
            self._ids_K = np.concatenate([self._ids_K, np.empty_like(self._ids_K)])
        self._low_HK[:, self._num_kept], self._ids_K[self._num_kept] = self._low_NH[row], row
        self._num_kept += 1

    def candidates(self, row: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return int64 [K]: the kept rows that share a bucket with this one, in their order; of crowded ones also how
        similar they are by the low bytes of their sketches, float32 [K]."""
        mine = self._buckets_NB[row]
        if self._sizes[mine[mine >= 0]].sum() > CROWDED:
            is_equal_HK = self._low_HK[:, : self._num_kept] == self._low_NH[row][:, None]
            num_equal_K = is_equal_HK.sum(axis=0, dtype=np.uint8)
            likely = np.flatnonzero(num_equal_K >= self._least_equal)
            order = likely[np.argsort(self._ids_K[likely], kind="stable")]
            return self._ids_K[order], num_equal_K[order] / np.float32(HASHES)
        neighbours: set[int] = set()
        for band, bucket in enumerate(self._buckets_NB[row].tolist()):
            other = int(self._newest[bucket]) if bucket >= 0 else -1
            while other >= 0:
                neighbours.add(other)
                other = int(self._before_NB[other, band])
        return np.array(sorted(neighbours), np.int64), None
