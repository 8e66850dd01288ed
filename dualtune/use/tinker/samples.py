"""Requests to sample, continued together: their rows in one batch, and the scores of their prompts.

A list of stops replaces what ends a turn: an empty one stops at nothing but max_tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.engine.adapter_bank import AdapterBank
from dualtune.engine.backend import Engine
from dualtune.train.generation.batched import Bounds, PromptedRow, RowBatch, ended_rows, prompted_row
from dualtune.train.generation.inference import LoadedModel
from dualtune.train.generation.sampling import LIKELY_TOKENS, Sampling
from dualtune.train.generation.token_logprobs import TokenLogprobs, token_logprobs
from dualtune.use.tinker.messages import SampledSequence, SampleRequest, SampleResult, TopLogprobs

MOST_SAMPLES = 1024  # of a request


@dataclass(frozen=True, slots=True)
class SampleLimits:
    max_length: int  # tokens of a prompt and its continuation together
    vocab: int


def admitted(
    model: LoadedModel, requests: Sequence[SampleRequest], indices: Sequence[int], limits: SampleLimits,
    is_cancelled: Callable[[int], bool],
) -> tuple[dict[int, PendingSamples], list[tuple[int, ConfigError]]]:  # fmt: skip
    """Return the requests with these indices that can be answered, and the refusals of the others.

    The samples of one that is cancelled end after the next token.
    """
    pending, refused = dict[int, PendingSamples](), list[tuple[int, ConfigError]]()
    for i in indices:
        try:
            check_request(requests[i], limits)
            rows = rows_of(model, i, requests[i], limits.max_length)
            for row in rows:
                row.ends = partial(_ends, row.ends, partial(is_cancelled, i))
            pending[i] = PendingSamples(requests[i], rows)
        except ConfigError as error:
            refused.append((i, error))
    return pending, refused


def _ends(ends: Callable[[list[int]], bool], is_cancelled: Callable[[], bool], tokens: list[int]) -> bool:
    return is_cancelled() or ends(tokens)


def sampled(
    engine: Engine, pending: Mapping[int, PendingSamples], is_shortage: Callable[[BaseException], bool],
    batch: RowBatch | None = None,
) -> Iterator[tuple[int, SampleResult]]:  # fmt: skip
    """Yield the index of each request and its result as they end. `batch`: into which their rows enter."""
    rows = [row for each in pending.values() for row in each.rows]
    ended = batch.ended(rows) if batch else ended_rows(engine, rows, Bounds(), is_shortage, lambda text: None)
    for row in ended:
        own = pending[row.number]
        own.num_ended += 1
        if own.num_ended == len(own.rows):
            yield row.number, own.result()


def check_request(request: SampleRequest, limits: SampleLimits) -> None:
    """Raise ConfigError for a request that no model can answer, or that asks for too much."""
    check_tokens("prompt", request.prompt, limits.max_length - 1, limits.vocab)
    most = min(LIKELY_TOKENS, limits.vocab)
    for what, value, low, high in (
        ("num_samples", request.num_samples, 1, MOST_SAMPLES),
        ("temperature", request.temperature, 0, 100),
        ("top_p", request.top_p, 1e-9, 1),
        ("top_k", request.top_k, -1, 1 << 31),
        ("topk_prompt_logprobs", request.topk_prompt_logprobs, 0, most),
        ("topk_sample_logprobs", request.topk_sample_logprobs, 0, most),
        ("max_tokens", 1 if request.max_tokens is None else request.max_tokens, 1, 1 << 31),
        ("seed", request.seed or 0, 0, (1 << 63) - 1),
    ):
        if not low <= value <= high:  # NaN is neither
            raise ConfigError(f"{what}: got {value}, allowed: {low} to {high}")


def check_tokens(where: str, tokens: np.ndarray, most: int, vocab: int) -> None:
    """Raise ConfigError unless there are 1 to `most` tokens, of those that the model has."""
    if not 0 < len(tokens) <= most:
        raise ConfigError(f"{where}: got {len(tokens)} tokens, allowed: 1 to {most}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ConfigError(f"{where}: got the token {wrong}, this model has 0 to {vocab - 1}")


@dataclass(slots=True)
class PendingSamples:
    """A request with its samples, as far as they are."""

    request: SampleRequest
    rows: Sequence[PromptedRow]
    of_prompt: TokenLogprobs | None = None
    num_ended: int = 0

    @property
    def needs_scores(self) -> bool:
        """Whether something is still to be said of the prompt."""
        return bool(self.request.prompt_logprobs or self.request.topk_prompt_logprobs) and self.of_prompt is None

    def result(self) -> SampleResult:
        sequences, said = [_sequence(row) for row in self.rows], self.of_prompt
        if said is None:
            return SampleResult(sequences)
        k = self.request.topk_prompt_logprobs
        top = TopLogprobs(*(values_Tk[:, :k] for values_Tk in said.top)) if said.top and k else None
        return SampleResult(sequences, said.logprobs if self.request.prompt_logprobs else None, top)


def rows_of(model: LoadedModel, number: int, request: SampleRequest, most: int) -> list[PromptedRow]:
    """Return a row for each sample of a request. Prompt and continuation have at most `most` tokens together."""
    room = most - len(request.prompt)
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    seed = secrets.randbelow(1 << 63) if request.seed is None else request.seed
    sampling = Sampling(limit, request.temperature, request.top_p, seed, max(0, request.top_k))
    texts, stop_ids = stops_of(request.stop)
    return [
        prompted_row(
            model, number, request.prompt, sampling, draws=(), stops=texts, stop_ids=stop_ids, sample=sample,
            keeps_logprobs=True, keeps_top=request.topk_sample_logprobs,
        )
        for sample in range(request.num_samples)
    ]  # fmt: skip


def stops_of(stop: Sequence[str] | Sequence[int] | None) -> tuple[list[str], frozenset[int] | None]:
    """Return the texts and the tokens that end a continuation; None: what ends a turn, which a list replaces."""
    if stop is None:
        return [], None
    texts = [each for each in stop if isinstance(each, str)]
    if not all(texts):
        raise ConfigError("stop: got an empty text. Leave it out; an empty list stops at nothing but max_tokens")
    return texts, frozenset(each for each in stop if not isinstance(each, str))


def score_prompts(engine: Engine, pending: Iterable[PendingSamples], bank: AdapterBank | None = None) -> None:
    """Score the prompts of the requests that ask for it, all at once.

    With a bank, each by the adapter that its rows have.
    """
    to_score = [each for each in pending if each.needs_scores]
    prompts, adapters = [each.request.prompt for each in to_score], [each.rows[0].adapter for each in to_score]
    top = max((each.request.topk_prompt_logprobs for each in to_score), default=0)
    scored = token_logprobs(engine, prompts, top, bank=bank, adapters=adapters)
    for each, scores in zip(to_score, scored, strict=True):
        each.of_prompt = scores


def _sequence(row: PromptedRow) -> SampledSequence:
    choose = row.choose
    last = () if choose.stopped_by is None else (choose.stopped_by,)
    top = TopLogprobs(*map(np.stack, zip(*choose.top, strict=True))) if choose.top else None
    return SampledSequence(
        np.array([*row.tokens, *last], np.int32), np.array(choose.logprobs, np.float32),
        "stop" if row.is_whole or last else "length", top,
    )  # fmt: skip
