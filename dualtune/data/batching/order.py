"""Which documents make up a step: a pure function of (seed, step).

Nothing here has a state to save. A resumed run asks for step n and gets what the uninterrupted run would have had, on
any backend, whatever the micro-batch size and the layout of the rows.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dualtune import interrupt
from dualtune.config import Config
from dualtune.errors import ConfigError

# Where an epoch begins is only known when those before it are planned, so what may be asked for has bounds.
MAX_STEPS = 10**9
MAX_EPOCHS = 100_000
MAX_DOCUMENTS = 5 * 10**8  # of all epochs together

MOST_TOKENS = 16384  # that an optimizer step takes, where the config leaves it open…
LEAST_STEPS = 100  # …and fewer where there would be fewer steps than this: a handful of updates teaches nothing


@dataclass(frozen=True, slots=True)
class Step:
    epoch: float  # epochs done when this step is done
    documents: np.ndarray  # indices


@dataclass(frozen=True, slots=True)
class _Epoch:
    documents: np.ndarray  # indices, in the order of this epoch
    bounds: np.ndarray  # step s of the epoch takes documents[bounds[s]:bounds[s + 1]]


class Order:
    """Steps of a run over documents of given lengths. Every epoch is a new permutation; its last step may be smaller.

    A step takes `documents_per_step` documents, or as many as fit into `tokens_per_step` (at least one); auto is
    resolved here, and `tokens_per_step` is the number that it stands for. With several
    sources, an epoch takes weight × n documents of a source of n: a weight of 0.5 takes one half in the first epoch
    and the other in the second, 2 takes each twice. A document of source -1 comes in no epoch.
    """

    def __init__(
        self, config: Config, lengths: Sequence[int] | np.ndarray, sources: np.ndarray | None = None,
        weights: Sequence[float] = (1.0,),
    ) -> None:  # fmt: skip
        self._lengths = np.asarray(lengths, np.int64)
        sources = np.zeros(len(self._lengths), np.int64) if sources is None else sources
        self._sources = [(np.flatnonzero(sources == s), weight) for s, weight in enumerate(weights)]
        _check_size(config, sum(weight * len(documents) for documents, weight in self._sources))
        self._seed = config.run.seed
        self._documents_per_step = config.train.documents_per_step
        asked = config.train.tokens_per_step
        self.tokens_per_step = self._enough_steps(config) if asked == "auto" else asked
        self._lock = threading.Lock()  # the loop asks, and the thread that makes the next batches
        self._starts = [0]  # first step of each epoch, as far as it is known
        self._epoch = lru_cache(2)(self._plan)
        self.num_steps = config.train.steps or self._count(config.train.epochs)

    def step(self, index: int) -> Step:
        """The documents of step `index`, counted from 0."""
        with self._lock:
            self._plan_until(index)
            number = bisect.bisect_right(self._starts, index) - 1
            epoch, within = self._epoch(number), index - self._starts[number]
        start, end = epoch.bounds[within : within + 2]
        return Step(float(number + end / len(epoch.documents)), epoch.documents[start:end])

    def _plan_until(self, index: int) -> None:
        is_far = False
        while self._starts[-1] <= index:
            if is_far:  # a resumed run's first look; in training, one epoch follows the other, and the loop polls
                interrupt.poll()
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1).bounds) - 1)
            is_far = True

    def _enough_steps(self, config: Config) -> int:
        """MOST_TOKENS, or as many as divide the tokens of all epochs into LEAST_STEPS."""
        if config.train.steps is not None or config.train.documents_per_step is not None:
            return MOST_TOKENS  # the number of steps is the user's choice
        tokens = sum(weight * int(self._lengths[documents].sum()) for documents, weight in self._sources)
        return max(1, min(MOST_TOKENS, int(config.train.epochs * tokens / LEAST_STEPS)))

    def _plan(self, epoch: int) -> _Epoch:
        documents = np.concatenate([self._taken(s, epoch) for s in range(len(self._sources))])
        documents = documents[np.random.default_rng([self._seed, 1, epoch]).permutation(len(documents))]
        return _Epoch(documents, np.asarray(self._bounds(self._lengths[documents]), np.int64))

    def _taken(self, source: int, epoch: int) -> np.ndarray:
        """The documents of a source in an epoch: the next weight × n of an endless row of permutations of them."""
        documents, weight = self._sources[source]
        n = len(documents)
        if weight == 1.0 or not n:
            return documents
        start, end = (math.floor(e * weight * n) for e in (epoch, epoch + 1))
        found = [np.zeros(0, np.int64)]
        for turn in range(start // n, -(-end // n)):
            shuffled = documents[np.random.default_rng([self._seed, 4, source, turn]).permutation(n)]
            found.append(shuffled[max(start - turn * n, 0) : end - turn * n])
        return np.sort(np.concatenate(found))

    def _bounds(self, lengths: np.ndarray) -> list[int]:
        if self._documents_per_step:
            return [*range(0, len(lengths), self._documents_per_step), len(lengths)]
        ends = np.cumsum(lengths)
        bounds = [0]
        while bounds[-1] < len(lengths):
            used = ends[bounds[-1] - 1] if bounds[-1] else 0
            end = int(np.searchsorted(ends, used + self.tokens_per_step, side="right"))
            bounds.append(max(end, bounds[-1] + 1))
        return bounds

    def _count(self, epochs: float) -> int:
        while len(self._starts) - 1 < epochs:
            interrupt.poll()
            self.step(self._starts[-1])
        share = epochs - (len(self._starts) - 2)  # of the last epoch
        return max(1, self._starts[-2] + round(share * (self._starts[-1] - self._starts[-2])))


def without(sources: np.ndarray, documents: Sequence[int]) -> np.ndarray:
    """The sources of all documents, for an `Order` that takes these documents in no epoch."""
    return np.where(np.isin(np.arange(len(sources)), documents), -1, sources) if len(documents) else sources


def _check_size(config: Config, documents_per_epoch: float) -> None:
    """ConfigError for more steps or epochs than anybody trains and than can be planned in a reasonable time."""
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
