"""The text of a row as a set of shingles, how similar two sets are, and sketches that find candidates among many.

A shingle is 5 characters in sequence, without case, runs of spaces as one: it needs no idea of what a word is in any
language. A sketch holds the least value of each of 64 hashes over a set: two sets share one with a probability that is
their Jaccard similarity (Broder, On the resemblance and containment of documents, 1997). Shape suffixes: S shingles of
a row, H hashes.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from dualtune.data.chat.conversations import Message
from dualtune.data.chat.formats import Example

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
    rejected = example.rejected or ()
    answers = [rejected] if isinstance(rejected, str) else [_text(message) for message in rejected]
    turns = [_text(message) for message in example.messages if message.role != "system"]
    return "\n".join((turns or [example.prompt or "", example.completion or ""]) + answers)


def _text(message: Message) -> str:
    extra = json.dumps(dict(message.extra), ensure_ascii=False, sort_keys=True) if message.extra else ""
    return f"{message.content}\n{extra}" if extra else message.content


def digest_of(example: Example) -> bytes:
    """Return 16 bytes that are equal for rows with the same conversation, in whatever format, key order or file.

    The conversation is every message with its role, loss weight and tool calls, and the tools; or else the plain text.
    """
    rejected = [_parts(message) if isinstance(message, Message) else message for message in example.rejected or ()]
    plain = None if example.messages else [example.prompt, example.completion, example.is_text]
    parts = [[_parts(message) for message in example.messages], list(example.tools), plain, rejected]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).digest()


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
