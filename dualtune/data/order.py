"""Choose the documents of each step, as a pure function of (seed, step).

There is no state to save. A resumed run gets the same documents for step n as an uninterrupted run, on any backend and
for any micro-batch size and sequence layout.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError
from dualtune.config import Config

# The start of an epoch is known only after planning all epochs before it, so the size of a run is limited.
MAX_STEPS = 10**9
MAX_EPOCHS = 100_000
MAX_DOCUMENTS = 5 * 10**8  # in all epochs together

MOST_TOKENS = 16384  # per optimizer step with the config's auto…
LEAST_STEPS = 100  # …and fewer if the run would have fewer steps than this, which is too few to learn


@dataclass(frozen=True, slots=True)
class Step:
    epoch: float  # epochs completed after this step
    documents: np.ndarray  # indices


@dataclass(frozen=True, slots=True)
class _Epoch:
    documents: np.ndarray  # indices, in the order of this epoch
    bounds: np.ndarray  # step s of the epoch takes documents[bounds[s]:bounds[s + 1]]


class Order:
    """The steps of a run over documents of given lengths.

    Each epoch is a new permutation of the documents; its last step may be smaller.

    A step takes `documents_per_step` documents, or as many as fit into `tokens_per_step` (at least one); auto is
    resolved here, and the attribute `tokens_per_step` is the resulting number. With several sources, an epoch takes
    weight × n documents of a source of n: a weight of 0.5 takes one half in the first epoch and the other in the
    second, 2 takes each document twice. Documents of source -1 occur in no epoch.

    `answers` documents in a row belong together, as the two of a pair: they count as one document in all of the above,
    and a step has all of them, side by side.
    """

    def __init__(
        self, config: Config, lengths: Sequence[int] | np.ndarray, sources: np.ndarray | None = None,
        weights: Sequence[float] = (1.0,), answers: int = 1,
    ) -> None:  # fmt: skip
        self._answers = answers
        self._lengths = np.asarray(lengths, np.int64).reshape(-1, answers).sum(1)
        sources = np.zeros(len(self._lengths), np.int64) if sources is None else sources[::answers]
        self._sources = [(np.flatnonzero(sources == s), weight) for s, weight in enumerate(weights)]
        _check_size(config, sum(weight * len(documents) for documents, weight in self._sources))
        self._seed = config.run.seed
        self.documents_per_step = config.train.documents_per_step
        tokens_per_step = config.train.tokens_per_step
        self.tokens_per_step = self._auto_tokens_per_step(config) if tokens_per_step == "auto" else tokens_per_step
        self._lock = threading.Lock()  # the loop and the prefetch thread both use it
        self._starts = [0]  # first step of each epoch planned so far
        self._epoch = lru_cache(2)(self._plan)
        self.num_steps = config.train.steps or self._steps_in(config.train.epochs)

    def step(self, index: int) -> Step:
        """Return the documents of step `index`, counted from 0."""
        with self._lock:
            self._plan_until(index)
            number = bisect.bisect_right(self._starts, index) - 1
            epoch, within = self._epoch(number), index - self._starts[number]
        start, end = epoch.bounds[within : within + 2]
        units = epoch.documents[start:end]
        documents = (self._answers * units[:, None] + np.arange(self._answers)).ravel()
        return Step(float(number + end / len(epoch.documents)), documents)

    def _plan_until(self, index: int) -> None:
        is_far = False
        while self._starts[-1] <= index:
            if is_far:  # only a resumed run's first step plans many; later the loop polls
                interrupt.poll()
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1).bounds) - 1)
            is_far = True

    def _auto_tokens_per_step(self, config: Config) -> int:
        """Return the tokens per step: MOST_TOKENS, or fewer so that the run has LEAST_STEPS steps."""
        if config.train.steps is not None or config.train.documents_per_step is not None:
            return MOST_TOKENS  # the number of steps is the user's choice
        tokens = sum(weight * int(self._lengths[documents].sum()) for documents, weight in self._sources)
        return max(1, min(MOST_TOKENS, int(config.train.epochs * tokens / LEAST_STEPS)))

    def _plan(self, epoch: int) -> _Epoch:
        documents = np.concatenate([self._taken(s, epoch) for s in range(len(self._sources))])
        documents = documents[np.random.default_rng([self._seed, 1, epoch]).permutation(len(documents))]
        return _Epoch(documents, np.asarray(self._bounds(self._lengths[documents]), np.int64))

    def _taken(self, source: int, epoch: int) -> np.ndarray:
        """Return a source's documents for an epoch: the next weight × n of an endless sequence of permutations."""
        documents, weight = self._sources[source]
        n = len(documents)
        if weight == 1.0 or not n:
            return documents
        start, end = (math.floor(e * weight * n) for e in (epoch, epoch + 1))
        parts = [np.zeros(0, np.int64)]
        for turn in range(start // n, -(-end // n)):
            shuffled = documents[np.random.default_rng([self._seed, 4, source, turn]).permutation(n)]
            parts.append(shuffled[max(start - turn * n, 0) : end - turn * n])
        return np.sort(np.concatenate(parts))

    def _bounds(self, lengths: np.ndarray) -> list[int]:
        if self.documents_per_step:
            return [*range(0, len(lengths), self.documents_per_step), len(lengths)]
        ends = np.cumsum(lengths)
        bounds = [0]
        while bounds[-1] < len(lengths):
            used = ends[bounds[-1] - 1] if bounds[-1] else 0
            end = int(np.searchsorted(ends, used + self.tokens_per_step, side="right"))
            bounds.append(max(end, bounds[-1] + 1))
        return bounds

    def _steps_in(self, epochs: float) -> int:
        while len(self._starts) - 1 < epochs:
            interrupt.poll()
            self.step(self._starts[-1])
        share = epochs - (len(self._starts) - 2)  # of the last epoch
        return max(1, self._starts[-2] + round(share * (self._starts[-1] - self._starts[-2])))


def without(sources: np.ndarray, documents: Sequence[int]) -> np.ndarray:
    """Return the sources with -1 for these documents, so that an `Order` excludes them from all epochs."""
    return np.where(np.isin(np.arange(len(sources)), documents), -1, sources) if len(documents) else sources


def _check_size(config: Config, documents_per_epoch: float) -> None:
    """Raise ConfigError for more steps or epochs than are useful and can be planned in reasonable time."""
    steps, epochs = config.train.steps, config.train.epochs
    if steps is not None and steps > MAX_STEPS:
        raise ConfigError(f"train.steps: got {steps}, at most {MAX_STEPS} are allowed")
    if steps is None and epochs > MAX_EPOCHS:
        raise ConfigError(f"train.epochs: got {epochs:g}, at most {MAX_EPOCHS} are allowed. Set train.steps instead")
    epochs = 1.0 if steps is not None else max(epochs, 1.0)
    if (total := epochs * documents_per_epoch) > MAX_DOCUMENTS:
        raise ConfigError(
            f"train.epochs: {epochs:g} epochs of {documents_per_epoch:.3g} documents (data.train with its weights) are "
            f"{total:.3g}, at most {MAX_DOCUMENTS:.3g} are allowed. Lower the weights or the epochs, or set train.steps"
        )
