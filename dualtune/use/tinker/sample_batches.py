"""Requests for samples from several adapters: in one batch where they form a bank, else one adapter after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dualtune.engine.adapter_bank import NO_ADAPTER, AdapterBank, bank_batches, why_not_bankable
from dualtune.engine.backend import Backend, Engine
from dualtune.engine.decoding import CannotBatch
from dualtune.engine.memory.serving import bank_numbers
from dualtune.model.adapter import AdapterSpec, Tensors
from dualtune.train.generation.batched import Bounds, RowBatch, check_decoding
from dualtune.train.generation.inference import BASE_ONLY
from dualtune.use.tinker.messages import SampleResult
from dualtune.use.tinker.samples import PendingSamples, sampled, score_prompts
from dualtune.use.tinker.seat import BankedWeights, Seat, Weights


@dataclass(frozen=True, slots=True)
class SampledSource:
    """The requests to sample from weights, or from the base alone (None)."""

    weights: Weights | None
    pending: Mapping[int, PendingSamples]  # by the index of the request


class SampleBatches:
    """What continues the rows of requests, in the engine of a seat."""

    def __init__(self, seat: Seat, backend: Backend, tell: Callable[[str], object]) -> None:
        """`tell` hears once of each reason for which adapters follow each other."""
        self._seat, self._backend, self._tell, self._told = seat, backend, tell, set[str]()

    def results(self, sources: Sequence[SampledSource]) -> Iterator[tuple[int, SampleResult]]:
        """Yield the index of each request and its result as they end."""
        engine = self._seat.present(BASE_ONLY)
        if len(sources) == 1 and not self._seat.lacks(sources[0].weights):
            yield from self._apart(sources)  # as the engine is, whatever the adapter
            return
        most_numbers = bank_numbers(engine.description.dtype, self._backend.memory())
        adapters = [source.weights and self._adapter(source.weights) for source in sources]
        for indices, is_bank in bank_batches(adapters, most_numbers):
            batch = [sources[i] for i in indices]
            # An engine with the spec of a single adapter computes with it as it is; for another it would be made anew.
            if is_bank and (len(batch) > 1 or self._seat.lacks(batch[0].weights)):
                yield from self._together(batch)
                continue
            for adapter in (adapters[i] for i in indices):
                if adapter is not None and (reason := why_not_bankable(*adapter)):
                    self._tell_once(reason)
            yield from self._apart(batch)

    def _apart(self, sources: Sequence[SampledSource]) -> Iterator[tuple[int, SampleResult]]:
        for source in sources:
            engine = self._scored(source)
            yield from sampled(engine, source.pending, self._backend.is_out_of_memory)

    def _together(self, sources: Sequence[SampledSource]) -> Iterator[tuple[int, SampleResult]]:
        """Yield the results of sources in one batch; apart, if the engine cannot or there is no room for a bank."""
        batch = None
        try:
            batch = self._banked(sources)
        except Exception as error:
            if not (isinstance(error, CannotBatch) or self._backend.is_out_of_memory(error)):
                raise
            self._tell_once(str(error) if isinstance(error, CannotBatch) else "there is no room for their bank")
        if batch is None:
            yield from self._apart(sources)
            return
        pending = {i: each for source in sources for i, each in source.pending.items()}
        yield from sampled(self._seat.present(BASE_ONLY), pending, self._backend.is_out_of_memory, batch)

    def _banked(self, sources: Sequence[SampledSource]) -> RowBatch:
        """Return a batch with a bank of adapters, whose numbers the rows of sources then have, and score their prompts.

        CannotBatch if the engine cannot compute with it. The last one is kept, so that what is sampled again and again
        is on the device already.
        """
        weights, engine = [source.weights for source in sources if source.weights], self._seat.present(BASE_ONLY)
        banked = self._seat.banked
        if banked is None or not banked.batch.is_empty or any(each not in banked.weights for each in weights):
            self._seat.banked = banked = None  # before another one is there
            bank = AdapterBank([self._adapter(each) for each in weights])
            rows = [row for source in sources for each in source.pending.values() for row in each.rows]
            check_decoding(engine, [row.prompt for row in rows[:2]], bank)
            batch = RowBatch(engine, Bounds(), self._backend.is_out_of_memory, lambda text: None, bank)
            self._seat.banked = banked = BankedWeights(weights, batch)
        for source in sources:
            number = NO_ADAPTER if source.weights is None else banked.weights.index(source.weights)
            for row in (row for each in source.pending.values() for row in each.rows):
                row.adapter = number
        score_prompts(engine, [each for source in sources for each in source.pending.values()], banked.batch.bank)
        return banked.batch

    def _scored(self, source: SampledSource) -> Engine:
        """Return the engine with the weights of a source, which have scored its prompts."""
        engine = self._seat.use(source.weights, BASE_ONLY)
        score_prompts(engine, source.pending.values())
        return engine

    def _tell_once(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._tell(f"samples     of adapters one after another: {reason}")

    def _adapter(self, weights: Weights) -> tuple[AdapterSpec, Tensors]:
        return weights.spec, self._seat.fetch(weights)
