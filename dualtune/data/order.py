"""Which documents make up a step, and in which micro-batches: a pure function of (seed, step).

Nothing here has a state to save. A resumed run asks for step n and gets what the uninterrupted run would have had, on
any backend, whatever the micro-batch size.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dualtune.backend import IGNORE_INDEX, Batch
from dualtune.config import Config
from dualtune.data.documents import Document

LENGTH_MULTIPLE = 16  # rows are padded to a multiple of this, so that few shapes occur


@dataclass(frozen=True, slots=True)
class Step:
    epoch: float  # epochs done when this step is done
    documents: np.ndarray  # indices


class Order:
    """Steps of a run over documents of given lengths. Every epoch is a new permutation; its last step may be smaller.

    A step takes `documents_per_step` documents, or as many as fit into `tokens_per_step` (at least one).
    """

    def __init__(self, config: Config, lengths: Sequence[int]) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        self._seed = config.run.seed
        self._documents_per_step = config.train.documents_per_step
        self._tokens_per_step = config.train.tokens_per_step
        self._epochs: list[list[np.ndarray]] = []  # planned so far
        self._starts = [0]  # first step of each epoch
        self.num_steps = config.train.steps or self._count(config.train.epochs)

    def step(self, index: int) -> Step:
        """The documents of step `index`, counted from 0."""
        while self._starts[-1] <= index:
            self._plan_epoch()
        epoch = bisect.bisect_right(self._starts, index) - 1
        steps, within = self._epochs[epoch], index - self._starts[epoch]
        done = sum(len(ids) for ids in steps[: within + 1])
        return Step(epoch + done / len(self._lengths), steps[within])

    def _plan_epoch(self) -> None:
        epoch = len(self._epochs)
        order = np.random.default_rng([self._seed, 1, epoch]).permutation(len(self._lengths))
        bounds = self._bounds(self._lengths[order])
        self._epochs.append([order[a:b] for a, b in pairwise(bounds)])
        self._starts.append(self._starts[-1] + len(self._epochs[-1]))

    def _bounds(self, lengths: np.ndarray) -> list[int]:
        if self._documents_per_step:
            return [*range(0, len(lengths), self._documents_per_step), len(lengths)]
        ends = np.cumsum(lengths)
        bounds = [0]
        while bounds[-1] < len(lengths):
            used = ends[bounds[-1] - 1] if bounds[-1] else 0
            end = int(np.searchsorted(ends, used + self._tokens_per_step, side="right"))
            bounds.append(max(end, bounds[-1] + 1))
        return bounds

    def _count(self, epochs: float) -> int:
        while len(self._epochs) < epochs:
            self._plan_epoch()
        share = epochs - (len(self._epochs) - 1)  # of the last epoch
        return max(1, self._starts[-2] + round(share * len(self._epochs[-1])))


def micro_batches(
    documents: Sequence[Document], ids: Sequence[int], *, max_tokens: int, seed: int, step: int
) -> list[Batch]:
    """Put the documents with these indices into padded micro-batches of at most `max_tokens` tokens, padding included.

    Longest first, so that rows of a micro-batch are of similar length and an out-of-memory shows at once.
    """
    by_length = sorted(ids, key=lambda i: -len(documents[i].tokens))
    groups: list[list[int]] = []
    for i in by_length:
        if groups and (len(groups[-1]) + 1) * _padded(len(documents[groups[-1][0]].tokens)) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_batch([documents[i] for i in group], group, seed, step) for group in groups]


def _padded(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def _batch(documents: Sequence[Document], ids: Sequence[int], seed: int, step: int) -> Batch:
    shape = (len(documents), _padded(max(len(document.tokens) for document in documents)))
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    labels = np.full(shape, IGNORE_INDEX, np.int32)
    noise = np.zeros(shape, np.uint32)
    for b, (document, id) in enumerate(zip(documents, ids, strict=True)):
        length = len(document.tokens)
        tokens[b, :length] = document.tokens
        labels[b, : length - 1] = np.where(document.trained[1:], document.tokens[1:], IGNORE_INDEX)
        segments[b, :length] = 1
        positions[b, :length] = np.arange(length)
        # Prefix-stable: the key of a position does not depend on the document's length or place in the batch.
        noise[b, :length] = np.random.default_rng([seed, 2, step, id]).integers(0, 1 << 32, length, np.uint32)
    return Batch(tokens, labels, segments, positions, noise)
