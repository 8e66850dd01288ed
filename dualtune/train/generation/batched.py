"""Many prompts continued together: rows enter a batch where there is room, and leave it when they have ended.

A row gets the tokens that it gets alone, ties of rounding aside: its random numbers are a function of the seed, its
numbers and the position, never of the batch. Rows of one prompt that enter together compute it once. Where the cache of
a model holds only one text, the rows follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from dualtune.base import interrupt
from dualtune.engine.adapter_bank import NO_ADAPTER, AdapterBank
from dualtune.engine.backend import NOISE, Engine
from dualtune.engine.decoding import CannotBatch, Decoding, GenerationCache, NextLogits
from dualtune.train.fingerprints import TOP_K, plain_batch
from dualtune.train.generation.caches import ConversationCaches
from dualtune.train.generation.inference import LoadedModel, allowed_tokens
from dualtune.train.generation.sampling import LIKELY_TOKENS, Chooser, Sampling, choose_all
from dualtune.train.generation.token_logprobs import TokenLogprobs, TopTokens, token_logprobs

MOST_ROWS = 64
MOST_TOKENS = 1 << 14  # in the cache, rows times the longest: 2 GiB for a Llama of 8B parameters in 16 bits
FEWEST_CACHED = 16  # tokens: fewer are computed together with the others that enter
TRIAL_TOKENS = (8, 3)  # of the two texts by which a batch is checked
_checked: WeakKeyDictionary[Engine, set[frozenset[str]]] = WeakKeyDictionary()  # and the layers of which banks


def _nothing() -> None:
    """Free no memory."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large a batch becomes. One row is always allowed."""

    rows: int = MOST_ROWS
    tokens: int = MOST_TOKENS  # rows times the most tokens that one of them may have at its end
    entering: int = MOST_TOKENS  # of the texts of rows that enter together, which are computed at once
    least_share: float = 0.25  # of the rows that enter together, while others wait

    def take(self, waiting: deque[PromptedRow], active: Sequence[PromptedRow]) -> list[PromptedRow]:
        """Take the rows that enter now, in their order: none while they are too small a share.

        Each time that rows enter, the cache of the others is copied.
        """
        entering, longest, widest = list[PromptedRow](), max((row.most_tokens for row in active), default=0), 0
        are_cached = bool(waiting) and waiting[0].begins_cached  # those whose beginnings are cached enter by themselves
        while waiting and (count := len(active) + len(entering) + 1) <= self.rows:
            longest = max(longest, waiting[0].most_tokens)
            widest = max(widest, waiting[0].num_tokens)
            is_large = count * longest > self.tokens or (entering and (len(entering) + 1) * widest > self.entering)
            if (count > 1 and is_large) or (entering and waiting[0].begins_cached != are_cached):
                break
            entering.append(waiting.popleft())
        if active and waiting and len(entering) < self.least_share * (len(active) + len(entering)):
            waiting.extendleft(reversed(entering))
            return []
        return entering


@dataclass(slots=True)
class PromptedRow:
    """A prompt and its continuation so far."""

    number: int  # of the prompt: with the seed and the sample, what its random numbers depend on
    prompt: np.ndarray  # int32 [T]
    limit: int  # tokens of the continuation
    choose: Chooser
    ends: Callable[[list[int]], bool]  # whether a text that ends the row is in these tokens
    tokens: list[int] = field(default_factory=list[int])
    has_ended: bool = False
    is_whole: bool = False  # the model ended it
    sample: int = 0  # of those of the prompt
    adapter: int = NO_ADAPTER  # its number in the bank, where the rows of a batch have several
    cache: GenerationCache | None = None  # with the same adapter, perhaps of the beginning of its text
    keep: Callable[[GenerationCache], object] | None = None  # gets the cache of its text at its end

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def text(self) -> np.ndarray:
        """The prompt and its continuation, int32 [T]."""
        return np.array([*self.prompt, *self.tokens], np.int32)

    @property
    def begins_cached(self) -> bool:
        """Whether enough of its beginning is cached, so that it is worth entering apart from those that are new."""
        return self.cache is not None and self.cache.num_shared(self.text) >= FEWEST_CACHED

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.limit

    def append(self, token: int | None) -> None:
        """Append the token that was chosen; None ends the row, as do a stop text and the last token that is allowed."""
        if token is not None:
            self.tokens.append(token)
        self.is_whole = token is None or self.ends(self.tokens)
        self.has_ended = self.is_whole or len(self.tokens) == self.limit


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows a prompt."""

    number: int
    text: str
    num_tokens: int
    is_whole: bool  # the model ended it; otherwise the limit of tokens did


def continue_all(
    model: LoadedModel,
    prompts: Sequence[np.ndarray],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
    bounds: Bounds | None = None,
    is_shortage: Callable[[BaseException], bool] = lambda error: False,
    tell: Callable[[str], object] = lambda text: None,
) -> Generator[Continuation]:
    """Yield the continuation of each prompt (token ids [T]) as it ends, in the order of their ends.

    `numbers`: of the prompts, such as those of their lines; by default 0, 1, 2, …, of which 0 draws what `stream_text`
    draws. The rest is as in `continue_rows`. ConfigError for a prompt that cannot be continued, before the first.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    rows = [prompted_row(model, number, prompt, sampling) for number, prompt in zip(numbers, prompts, strict=True)]
    yield from continue_rows(model, rows, bounds=bounds, is_shortage=is_shortage, tell=tell)


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the continuations of a prompt, with what training on it needs."""

    prompt: int  # its index
    number: int  # of the samples of the prompt
    tokens: np.ndarray  # int32 [T], with the stop token if one has ended it
    logprobs: np.ndarray  # float32 [T]: log p of each, whatever was left out; `Sampling` says at which temperature
    text: str  # of the tokens, but for what ends a turn
    is_whole: bool  # the model ended it; otherwise the limit of tokens did
    top: TopTokens | None = None  # in the place of each token, if they were asked for
    of_prompt: TokenLogprobs | None = None  # the same of the prompt's tokens, if it was asked for

    @classmethod
    def read(cls, record: dict[str, Any]) -> Completion:
        """Return the completion of another process, from its fields."""
        return cls(**record)


def sample_all(
    model: LoadedModel,
    prompts: Sequence[np.ndarray],
    sampling: Sampling,
    num_samples: int = 1,
    *,
    stops: Sequence[str] = (),
    numbers: Sequence[Sequence[int]] | None = None,
    prompt_logprobs: bool = False,
    top_logprobs: int = 0,
    caches: ConversationCaches | None = None,
    bounds: Bounds | None = None,
    is_shortage: Callable[[BaseException], bool] = lambda error: False,
    tell: Callable[[str], object] = lambda text: None,
) -> Generator[Completion]:
    """Yield `num_samples` continuations of each prompt (token ids [T]) as they end.

    `stops`: texts with which a continuation ends as soon as they are complete. `numbers`: of each prompt, on which its
    random numbers depend; by default its index. `prompt_logprobs`: also score the tokens of the prompts, which takes a
    forward pass of its own. `top_logprobs`: how many of the most probable tokens in the place of each sampled token
    (and of each of the prompt, if that is scored) to return, at most LIKELY_TOKENS. `caches`: of the prompts, which are
    conversations with one answer each now. The rest is as in `continue_all`.
    """
    if not 0 <= top_logprobs <= LIKELY_TOKENS:
        raise ValueError(f"top_logprobs: got {top_logprobs}, allowed: 0 to {LIKELY_TOKENS}")
    numbers = [(index,) for index in range(len(prompts))] if numbers is None else numbers
    rows = [
        prompted_row(
            model, index, prompt, sampling, draws=draws, stops=stops, sample=sample, keeps_logprobs=True,
            keeps_top=top_logprobs,
        )
        for index, (draws, prompt) in enumerate(zip(numbers, prompts, strict=True))
        for sample in range(num_samples)
    ]  # fmt: skip
    scored = token_logprobs(model.engine, prompts, top_logprobs) if prompt_logprobs else [None] * len(prompts)
    free: Callable[[], object] = _nothing
    if caches is not None:
        free = caches.forget
        for row in rows:
            row.cache, row.keep = caches.take(row.number), caches.keeper(row.number)
        rows.sort(key=lambda row: not row.begins_cached)  # so that all of them enter together
    for row, continuation in _continued(model, rows, bounds, is_shortage, tell, free):
        last = () if row.choose.stopped_by is None else (row.choose.stopped_by,)
        tokens = np.array([*row.tokens, *last], np.int32)
        logprobs = np.array(row.choose.logprobs, np.float32)
        top = TopTokens(*map(np.stack, zip(*row.choose.top, strict=True))) if row.choose.top else None
        yield Completion(
            row.number, row.sample, tokens, logprobs, continuation.text, continuation.is_whole, top, scored[row.number]
        )


def prompted_row(
    model: LoadedModel, number: int, prompt: np.ndarray, sampling: Sampling, *, draws: Sequence[int] | None = None,
    stops: Sequence[str] = (), stop_ids: frozenset[int] | None = None, sample: int = 0, keeps_logprobs: bool = False,
    keeps_top: int = 0,
) -> PromptedRow:  # fmt: skip
    """Return the row of a prompt, which ends as soon as its continuation has one of the `stops`.

    `draws`: other numbers than its own, on which its random numbers depend. `stop_ids`: the tokens that end it, in
    place of what ends a turn. ConfigError for a prompt that cannot be continued.
    """
    limit = allowed_tokens(model, prompt, sampling.max_tokens)
    numbers = (*((number,) if draws is None else draws), sample)
    choose = Chooser(
        replace(sampling, max_tokens=limit), model.tokenizer.stop_ids if stop_ids is None else stop_ids,
        numbers=numbers, keeps_logprobs=keeps_logprobs, keeps_top=keeps_top,
    )  # fmt: skip
    texts = tuple(filter(None, (*stops, model.tokenizer.stop_text if stop_ids is None else None)))
    decode = model.tokenizer.decode
    # A character is four tokens at most. A few tokens are decoded at each step, and all only to be sure.
    most = 4 * max(map(len, texts), default=0) + 4

    def ends(tokens: list[int]) -> bool:
        return _has_any(decode(tokens[-most:]), texts) and _has_any(_text(model, prompt, tokens), texts)

    return PromptedRow(
        number, prompt, limit, choose, ends if texts else lambda _: False, has_ended=not limit, sample=sample
    )


def _has_any(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


def _text(model: LoadedModel, prompt: np.ndarray, tokens: list[int]) -> str:
    """Return the text of tokens after a prompt, as `stream_text` does."""
    before = prompt[-1:].tolist()
    return model.tokenizer.decode([*before, *tokens])[len(model.tokenizer.decode(before)) :]


def continue_rows(
    model: LoadedModel,
    rows: Sequence[PromptedRow],
    *,
    bounds: Bounds | None = None,
    is_shortage: Callable[[BaseException], bool] = lambda error: False,
    tell: Callable[[str], object] = lambda text: None,
) -> Generator[Continuation]:
    """Yield the continuation of each row as it ends, without the text that ends a turn; a row's own stop text is there.

    If an error `is_shortage` of memory, the same rows go on in a batch of half the size. `tell` hears of that, and why
    rows follow each other if they must.
    """
    for _, continuation in _continued(model, rows, bounds, is_shortage, tell):
        yield continuation


def _continued(
    model: LoadedModel, rows: Sequence[PromptedRow], bounds: Bounds | None,
    is_shortage: Callable[[BaseException], bool], tell: Callable[[str], object],
    free: Callable[[], object] = _nothing,
) -> Iterator[tuple[PromptedRow, Continuation]]:  # fmt: skip
    for row in ended_rows(model.engine, rows, bounds or Bounds(), is_shortage, tell, free=free):
        interrupt.poll()
        text = _text(model, row.prompt, row.tokens)
        if stop := model.tokenizer.stop_text:
            text = text.partition(stop)[0]
        is_whole = row.is_whole or len(row.tokens) < row.limit
        yield row, Continuation(row.number, text, len(row.tokens), is_whole)


def ended_rows(
    engine: Engine, rows: Sequence[PromptedRow], bounds: Bounds, is_shortage: Callable[[BaseException], bool],
    tell: Callable[[str], object], bank: AdapterBank | None = None, free: Callable[[], object] = _nothing,
) -> Iterator[PromptedRow]:  # fmt: skip
    """Yield each row when it has ended. `free` frees memory that can be done without.

    With a bank each row has its own adapter. CannotBatch, before the first row, if the engine cannot do that.
    """
    yield from (row for row in rows if row.has_ended)
    rows = [row for row in rows if not row.has_ended]
    if not rows:
        return
    try:
        check_decoding(engine, [row.prompt for row in rows[:2]], bank)
    except CannotBatch as reason:
        if bank is not None:
            raise
        if len(rows) > 1:
            tell(f"answers one by one: {reason}")
    else:
        yield from RowBatch(engine, bounds, is_shortage, tell, bank, free).ended(rows)
        return
    for row in rows:
        cache, row.cache = row.cache or GenerationCache(), None
        for token in engine.generate(row.prompt, choose=row.choose, cache=cache):
            interrupt.poll()
            row.append(token)
            if row.has_ended:  # the scores take a forward pass
                break
        if row.keep is not None:
            row.keep(cache)
        yield row


class RowBatch:
    """Rows that are continued together: those that wait enter where there is room, and all leave when they have ended.

    A row can enter again, with the tokens that it has. As long as it is kept, its adapters are on the device.
    """

    def __init__(
        self, engine: Engine, bounds: Bounds, is_shortage: Callable[[BaseException], bool],
        tell: Callable[[str], object], bank: AdapterBank | None = None, free: Callable[[], object] = _nothing,
    ) -> None:  # fmt: skip
        """`free` frees memory that can be done without, before a batch becomes smaller."""
        self._free = free
        self.bank, self._engine, self._bounds, self._most = bank, engine, bounds, bounds
        self._is_shortage, self._tell = is_shortage, tell
        self.waiting, self.active = deque[PromptedRow](), list[PromptedRow]()
        self._decoding = self._begin()
        self._is_their_turn = False  # of the rows that have waited while others entered

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.active)

    def ended(self, rows: Iterable[PromptedRow]) -> Iterator[PromptedRow]:
        """Continue rows, and yield each when it has ended."""
        self.waiting.extend(rows)
        while not self.is_empty:
            interrupt.poll()
            yield from self.step()

    def step(self) -> list[PromptedRow]:
        """Append a token to each row that enters, or to all if none does. Return the rows that have ended."""
        entering = [] if self._is_their_turn else self._bounds.take(self.waiting, self.active)
        self._is_their_turn = bool(entering and self.active)
        self.active += entering
        try:
            chosen = _next_tokens(self._decoding, self.active, entering)
        except Exception as error:
            if not self._is_shortage(error) or len(self.active) == 1:
                raise
            chosen = None
        # Outside of the block, where the traceback holds no memory any more: the same rows enter a smaller batch.
        if chosen is None:
            self._halve()
            return []
        for row, token in zip(entering or self.active, chosen, strict=True):
            row.append(token)
        ended, staying = [row for row in self.active if row.has_ended], _staying(self.active)
        if ended:
            self._keep_ended()
            self._decoding.leave(staying)
        self.active = [self.active[i] for i in staying]
        if self.is_empty:  # what comes next may be shorter than what was too long for memory
            self._bounds = self._most
        return ended

    def _keep_ended(self) -> None:
        """Pass on the caches of the rows that have ended, if they ask for them and there is memory for a copy."""
        for i, row in enumerate(self.active):
            if not row.has_ended or row.keep is None:
                continue
            cache = GenerationCache()
            try:
                self._decoding.hold(i, row.text, cache)
            except Exception as error:
                if not self._is_shortage(error):
                    raise
                self._free()
            else:
                row.keep(cache)

    def _halve(self) -> None:
        self._bounds = replace(self._bounds, rows=len(self.active) // 2)
        self._tell(f"memory ran out with {len(self.active)} answers at once; {self._bounds.rows} from here on")
        self.waiting.extendleft(reversed(self.active))
        self.active, self._is_their_turn = [], False
        for row in self.waiting:
            row.cache = None
        del self._decoding
        self._free()
        self._engine.discard()
        self._decoding = self._begin()

    def _begin(self) -> Decoding:
        return self._engine.decoding() if self.bank is None else self._engine.decoding(self.bank)


def _staying(active: Sequence[PromptedRow]) -> list[int]:
    """Return the indices of the rows that continue. The last ones take the places of those that ended."""
    count = sum(not row.has_ended for row in active)
    last = [i for i in range(count, len(active)) if not active[i].has_ended]
    return [last.pop() if active[i].has_ended else i for i in range(count)]


def _next_tokens(
    decoding: Decoding, active: Sequence[PromptedRow], entering: Sequence[PromptedRow]
) -> list[int | None]:
    """Return the next token of each row that enters, or of each active one if none does; None where the row ends."""
    rows = entering or active
    if entering:
        logits = _enter(decoding, entering)
    else:
        logits = decoding.advance(np.array([row.tokens[-1] for row in active], np.int32))
    if not all(row.choose.is_greedy for row in rows):
        return choose_all([row.choose for row in rows], logits)
    # No logits leave the device.
    is_last = all(len(row.tokens) + 1 == row.limit for row in active)
    tokens_B = logits.most_probable(is_last=is_last)
    return [row.choose.greedy(token) for row, token in zip(rows, tokens_B.tolist(), strict=True)]


def _enter(decoding: Decoding, rows: Sequence[PromptedRow]) -> NextLogits:
    """Enter rows; those with the same text and adapter are computed once."""
    number_of, text_of, are_cached = dict[tuple[int, bytes], int](), list[int](), rows[0].begins_cached
    texts, adapters, caches = list[np.ndarray](), list[int](), list[GenerationCache | None]()
    for row in rows:
        text = row.text
        number = number_of.setdefault((row.adapter, text.tobytes()), len(texts))
        if number == len(texts):
            texts.append(text)
            adapters.append(row.adapter)
            caches.append(row.cache)
        text_of.append(number)
        row.cache = None
    options: dict[str, Any] = {} if set(adapters) == {NO_ADAPTER} else {"adapters": adapters}
    if are_cached:
        options["caches"] = caches
    return decoding.enter(texts, **options) if len(texts) == len(rows) else decoding.enter(texts, text_of, **options)


def check_decoding(engine: Engine, prompts: Sequence[np.ndarray], bank: AdapterBank | None = None) -> None:
    """Raise CannotBatch unless the engine computes beginnings of one or two prompts in a batch as it does alone.

    Not every model family keeps the rows of a batch apart, and none says so. With a bank, also unless it does so with
    two adapters of the same layers, where it continues texts and where it scores them. What an engine has passed it is
    not asked again.
    """
    texts = [prompts[i][:length] for i, length in zip((0, -1), TRIAL_TOKENS, strict=True)]
    passed = _checked.setdefault(engine, set())
    if frozenset() not in passed:
        decoded = _in_batch(engine.decoding(), texts)
        _check_close(engine, decoded, [engine.logprobs(plain_batch(text))[0, -1] for text, _ in decoded])
        passed.add(frozenset())
    if bank is None:
        return
    engine.decoding(bank)  # tells whether these adapters fit
    if (layers := frozenset(bank.shapes)) not in passed:
        _try_bank(engine, AdapterBank.random(bank.shapes), texts)
        passed.add(layers)


def _try_bank(engine: Engine, bank: AdapterBank, texts: Sequence[np.ndarray]) -> None:
    """Raise CannotBatch unless two texts, each with an adapter of its own, have what each has alone."""
    decoding, numbers = engine.decoding(bank), [0, 1]
    decoded, alone = _in_batch(decoding, texts, adapters=numbers), list[np.ndarray]()
    for (text, _), number in zip(decoded, 2 * numbers, strict=True):
        decoding.leave([])
        alone.append(decoding.enter([text], adapters=[number]).rows()[0])
    _check_close(engine, decoded, alone)
    # The longer texts end with a token after each text: the scores in its place follow from the text alone.
    longer, top = [text for text, _ in decoded[len(texts) :]], min(TOP_K, len(alone[0]))
    scored = token_logprobs(engine, longer, top, bank=bank, adapters=numbers)
    for scores, alone_V in zip(scored, alone[: len(texts)], strict=True):
        assert scores.top is not None
        _check_gap(engine, scores.top.logprobs_Tk[-1] - _log_softmax(alone_V)[scores.top.tokens_Tk[-1]])


def _in_batch(decoding: Decoding, texts: Sequence[np.ndarray], **options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return texts, and each with a token more, with the logits [V] that they have in a batch."""
    longer = [np.append(text, text[-1]) for text in texts]
    try:
        entered_BV = decoding.enter(texts, **options).rows()
        advanced_BV = decoding.advance(np.array([text[-1] for text in texts], np.int32)).rows()
    except (TypeError, ValueError, NotImplementedError, AttributeError, IndexError, AssertionError) as error:
        raise CannotBatch(f"{type(error).__name__}: {error}") from error
    return [*zip(texts, entered_BV, strict=True), *zip(longer, advanced_BV, strict=True)]


def _check_close(engine: Engine, decoded: Sequence[tuple[np.ndarray, np.ndarray]], alone: Sequence[np.ndarray]) -> None:
    """Raise CannotBatch unless texts have the probabilities that each has alone. Both are given as logits [V]."""
    for (_, logits_V), alone_V in zip(decoded, alone, strict=True):
        top = np.argsort(-alone_V)[:TOP_K]
        _check_gap(engine, _log_softmax(logits_V)[top] - _log_softmax(alone_V)[top])


def _check_gap(engine: Engine, differences: np.ndarray) -> None:
    gap = float(np.abs(differences).mean())
    if not gap <= 10 * max(NOISE[engine.description.dtype], NOISE["float32"]):  # it may be NaN
        raise CannotBatch(f"in a batch the log-probabilities of this model differ by {gap:.2g}")


def _log_softmax(logits_V: np.ndarray) -> np.ndarray:
    shifted_V = logits_V.astype(np.float64) - float(logits_V.max())
    return shifted_V - np.log(np.exp(shifted_V).sum())
