"""Work that differs between processes, such as drawing samples, with a base that they hold together.

A sharded base computes only where all processes do: each layer is gathered from all of them. So each says before every
forward pass that it makes one, and those that have nothing left to compute make one of a single token with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np

from dualtune.engine.adapter_bank import AdapterBank
from dualtune.engine.backend import Batch, Engine
from dualtune.engine.decoding import CannotBatch, Decoding, GenerationCache, NextLogits
from dualtune.train.fingerprints import plain_batch
from dualtune.train.team import Team


@contextmanager
def apart(engine: Engine, team: Team) -> Generator[Engine]:
    """Let each process draw and score for itself in the block, with this engine; all leave it together."""
    if team.size == 1 or engine.description.sharding != "full":
        with team.apart():
            yield engine
        return
    with team.in_step(lambda: engine.logprobs(plain_batch(np.zeros(1, np.int32)))):
        yield cast(Engine, _in_step(engine, team))


@lru_cache(1)
def _in_step(engine: Engine, team: Team) -> InStep:
    """Return the same one for the same engine, because it remembers the results of trials."""
    with suppress(CannotBatch):
        engine.decoding()  # an engine may first try how it continues a text: all do that now
    return InStep(engine, partial(team.all_done, False))


class InStep:
    """An engine that tells the other processes of each forward pass that draws or scores, before it makes it."""

    def __init__(self, engine: Engine, tell: Callable[[], object]) -> None:
        self._engine, self._tell = engine, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logprobs(self, batch: Batch) -> np.ndarray:
        self._tell()
        return self._engine.logprobs(batch)

    def target_logprobs(self, batch: Batch, *, dropout: bool = False) -> np.ndarray:
        self._tell()
        return self._engine.target_logprobs(batch, dropout=dropout)

    def generate(
        self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None], cache: GenerationCache | None = None
    ) -> Iterator[int]:
        tokens = self._engine.generate(prompt, choose=choose, cache=cache)
        while True:  # each takes a forward pass, and so does finding out that there is none
            self._tell()
            token = next(tokens, None)
            if token is None:
                return
            yield token

    def decoding(self, bank: AdapterBank | None = None) -> Decoding:
        return DecodingInStep(self._engine.decoding(bank), self._tell)


class DecodingInStep:
    """See `dualtune.engine.decoding.Decoding`."""

    def __init__(self, decoding: Decoding, tell: Callable[[], object]) -> None:
        self._decoding, self._tell = decoding, tell

    def enter(
        self, texts: Sequence[np.ndarray], text_of: Sequence[int] | None = None,
        *, adapters: Sequence[int] | None = None, caches: Sequence[GenerationCache | None] | None = None,
    ) -> NextLogits:  # fmt: skip
        self._tell()
        return self._decoding.enter(texts, text_of, adapters=adapters, caches=caches)

    def advance(self, tokens_B: np.ndarray) -> NextLogits:
        self._tell()
        return self._decoding.advance(tokens_B)

    def hold(self, row: int, text: np.ndarray, cache: GenerationCache) -> None:
        self._decoding.hold(row, text, cache)

    def leave(self, staying: Sequence[int]) -> None:
        self._decoding.leave(staying)
