"""The requests that wait for the engine, and those that it answers at once, in the thread that has loaded the model."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError, Preempted
from dualtune.base.http_server import BadRequest
from dualtune.data.chat.call_notations import WrittenCall
from dualtune.data.sources.rows import RowError
from dualtune.train.generation.batched import Bounds, PromptedRow
from dualtune.train.generation.inference import LoadedModel, StopTexts, TokenText, allowed_tokens
from dualtune.train.generation.sampling import Chooser
from dualtune.use.chat import AdapterSet
from dualtune.use.serve.answer_text import (
    AnswerScores,
    AnswerText,
    BegunAnswer,
    begun_answer,
    calls_of,
    encoded,
    prompt_scores,
)
from dualtune.use.serve.requests import CompletionRequest
from dualtune.use.serve.rows import ServedRows, batch_groups

POLL_S = 0.2
AT_ONCE = Bounds(least_share=0.0)  # a request does not wait for others to enter with
FORCED = "The name of a function is forced, its arguments are not: their schema is for the model alone"


class _NoCall(Exception):
    """An answer that had to be a call."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer."""

    # "stop": the model or a stop text; "tool_calls": the same, with calls; "length": as many tokens as allowed, or as
    # fit into the time
    reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the model says of the prompt, or of tokens of the answer; in a stream, of those of the piece after it."""

    table: Mapping[str, Any]


Piece = str | WrittenCall | TokenScores | Finish


@dataclass(slots=True)
class PendingAnswer:
    """A request on its way. The thread of the connection reads `pieces`: texts, calls, then a Finish or an error."""

    request: CompletionRequest
    pieces: queue.SimpleQueue[Piece | Exception] = field(default_factory=lambda: queue.SimpleQueue())
    is_cancelled: bool = False  # the client is gone

    def answer(self, client_is_gone: Callable[[], bool]) -> Iterator[Piece]:
        """Yield the pieces as they come, the last one a Finish. Raises the error that ended it.

        ConnectionAbortedError if the client goes, also while its request waits for others.
        """
        while True:
            if client_is_gone():
                raise ConnectionAbortedError
            try:
                piece = self.pieces.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(piece, Exception):
                raise piece
            yield piece
            if isinstance(piece, Finish):
                return


class RunningAnswer:
    """An answer on its way: its row, and how what the tokens say reaches the client."""

    def __init__(
        self, job: PendingAnswer, number: int, model: LoadedModel, prompt: np.ndarray, text: AnswerText,
        choices: Sequence[Sequence[int]], max_tokens: int, ends: float,
    ) -> None:  # fmt: skip
        """`choices`: tokens, with some of which it begins. `ends`: the time after which it gets no other token."""
        request, tokenizer = job.request, model.tokenizer
        self.job, self.error, self._text, self._ends, self._is_late = job, None, text, ends, False
        self._scores = None if request.logprobs is None else AnswerScores(request, tokenizer)
        self._tokens = TokenText(tokenizer, prompt, tokenizer.call_marks if request.tools else frozenset())
        self._cut = StopTexts(request.stops)
        limit = allowed_tokens(model, prompt, max_tokens)
        choose = Chooser(
            replace(request.sampling, max_tokens=limit), tokenizer.stop_ids, penalties=request.penalties, first=choices,
            keeps_logprobs=request.logprobs is not None, keeps_top=request.logprobs or 0,
        )  # fmt: skip
        self.row = PromptedRow(number, prompt, limit, choose, self._ends_with, has_ended=not limit)

    def _ends_with(self, tokens: list[int]) -> bool:
        """Pass on the text of the last token, but for what may become a stop text or a call. Return whether it ends."""
        try:
            self._pass_on(self._text.feed(self._cut.feed(self._tokens.feed(tokens[-1]))))
        except Exception as error:  # noqa: BLE001  of this answer, which must not end the others
            self.error = error
        self._is_late = time.monotonic() > self._ends
        return self._has_text_ended or self._is_late or self.job.is_cancelled or self.error is not None

    @property
    def _has_text_ended(self) -> bool:
        return self._cut.found or self._text.is_complete or self._tokens.is_ended

    def finish(self) -> None:
        """Pass on the rest: what was held back is text, or a call. _NoCall if it ended too early for its call."""
        is_cut = self._is_late or len(self.row.tokens) >= self.row.limit
        is_whole = self._has_text_ended or not is_cut
        rest = "" if self._has_text_ended else self._cut.feed(self._tokens.rest())
        last_pieces, text = self._text.end(rest + self._cut.rest()), self._text
        if self.job.request.must_call and is_whole and not text.num_calls:
            words = "".join(piece for piece in last_pieces if isinstance(piece, str))
            raise _NoCall(f"tool_choice: the answer began as a call, and the model wrote none: {words[:200]}. {FORCED}")
        self._pass_on(last_pieces)
        if self._scores and (self._scores.has_new(self.row) or not self.job.request.stream):
            self.job.pieces.put(TokenScores(self._scores.table(self.row)))
        reason = ("tool_calls" if text.num_calls else "stop") if is_whole else "length"
        self.job.pieces.put(Finish(reason, len(self.row.prompt), len(self.row.tokens)))

    def _pass_on(self, pieces: Sequence[str | WrittenCall]) -> None:
        if pieces and self.job.request.stream and self._scores and self._scores.has_new(self.row):
            self.job.pieces.put(TokenScores(self._scores.table(self.row)))
        for piece in pieces:
            self.job.pieces.put(piece)


class Answers:
    """The queue of requests, and what answers them: at most `bounds` at once, the others in their order.

    `is_fatal`: whether an error leaves nothing that can answer; `is_shortage`: whether it is one of memory. `tell`
    hears what keeps requests out of a batch.
    """

    def __init__(
        self, adapters: AdapterSet, *, max_tokens: int, max_prompt: int, max_waiting: int, time_limit_s: float,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
        is_shortage: Callable[[BaseException], bool] = lambda error: False,
        systems: Mapping[str, str | None] | None = None, bounds: Bounds = AT_ONCE, bank_numbers: int = 1 << 62,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:  # fmt: skip
        """`systems`: by model, the system message of a conversation that has none. `bank_numbers`: of all adapters in a
        batch, about so many at most."""
        self.names, self._is_fatal = adapters.names, is_fatal
        self._systems = systems or {}
        self._adapters, self._time_limit_s = adapters, time_limit_s
        self._max_tokens, self._max_prompt = max_tokens, max_prompt
        self._waiting: queue.Queue[PendingAnswer] = queue.Queue(max_waiting)
        self._next: PendingAnswer | None = None  # for which there was no room
        self._scored = list[tuple[PendingAnswer, np.ndarray]]()  # with their prompts, which are scored together
        self._numbers, self._running = count(), dict[int, RunningAnswer]()
        groups = batch_groups(adapters, bank_numbers, tell)
        self._rows = ServedRows(adapters, groups, bounds, is_shortage, self._is_over, tell)

    def check_model(self, name: str) -> None:
        """Raise BadRequest 404 for an unknown model."""
        if name not in self.names:
            raise BadRequest(404, f"model: got '{name[:100]}', there are: {', '.join(self.names)}", "model")

    def submit(self, request: CompletionRequest) -> PendingAnswer:
        """Put a request into the queue. BadRequest 404 for an unknown model, 429 if too many wait."""
        self.check_model(request.model)
        job = PendingAnswer(request)
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            raise BadRequest(429, f"{self._waiting.maxsize} requests are waiting; try again later") from None
        return job

    def answer_next(self) -> None:
        """Begin the requests that have room, and extend the answers by a token, or return after a moment without any.

        Only the engine's thread calls this.
        """
        try:
            while (job := self._take()) is not None:
                if not self._begin(job):
                    self._next = job
                    break
            self._score(self._scored)
            self._scored = []
            if self._running:
                interrupt.poll()
            for row, error in self._rows.step():
                self._end(self._running.pop(row.number), error)
        except Exception as error:  # nothing can answer any more
            jobs = [*(answer.job for answer in self._running.values()), *(job for job, _ in self._scored)]
            for job in [*jobs, *self._left()]:
                self._refuse(job, error)
            raise

    def _left(self) -> Iterator[PendingAnswer]:
        """Take the requests that have not begun."""
        if self._next is not None:
            yield self._next
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._waiting.get_nowait()

    def _take(self) -> PendingAnswer | None:
        """Return the next request, or None: there is none, for a moment if nothing else is to be done."""
        job, self._next = self._next, None
        is_idle = not (self._running or self._scored)
        while job is None or job.is_cancelled:
            try:
                job = self._waiting.get(timeout=POLL_S) if is_idle else self._waiting.get_nowait()
            except queue.Empty:
                return None
        return job

    def _begin(self, job: PendingAnswer) -> bool:
        """Begin an answer, or note a prompt that is scored. Return False if there is no room for its row."""
        request = job.request
        if request.scored is None and not self._rows.has_room(request.model):
            return False
        try:
            if request.scored is not None:
                self._scored.append((job, self._checked(self._question(request))))
            elif (answer := self._started(job)).row.has_ended:
                answer.finish()
            else:
                self._rows.add(request.model, answer.row)
                self._running[answer.row.number] = answer
        except Exception as error:
            self._refuse(job, error)
            if self._is_over(error):
                raise
        return True

    def _started(self, job: PendingAnswer) -> RunningAnswer:
        request, model = job.request, self._adapters.models[job.request.model]
        tokenizer = model.tokenizer
        # An answer that must be a call is begun as one: the model continues it, and only chooses the function.
        beginning = begun_answer(request, tokenizer) if request.must_call else BegunAnswer()
        text = AnswerText(request, calls_of(request, tokenizer) if request.tools else None, beginning.text)
        question = self._question(request)
        prompt = self._checked(np.concatenate([question, np.array(beginning.ids, question.dtype)]))
        most = min(request.max_tokens or self._max_tokens, self._max_tokens)
        ends = time.monotonic() + self._time_limit_s
        return RunningAnswer(job, next(self._numbers), model, prompt, text, beginning.choices, most, ends)

    def _score(self, scored: Sequence[tuple[PendingAnswer, np.ndarray]]) -> None:
        """Score prompts, each by the model of its request: together, or each by itself if one of them fails."""
        if not scored:
            return
        try:
            pieces = self._scores(scored)
        except Exception as error:
            if self._is_over(error):
                raise
            if len(scored) == 1:
                self._refuse(scored[0][0], error)
            pieces = []
        # Outside of the block, where the traceback holds no memory any more.
        if not pieces and len(scored) > 1:
            for each in scored:
                self._score([each])
        for (job, _), own in zip(scored, pieces, strict=False):
            for piece in own:
                job.pieces.put(piece)

    def _scores(self, scored: Sequence[tuple[PendingAnswer, np.ndarray]]) -> list[list[Piece]]:
        """Return what the client of each request gets."""
        top = max(job.request.scored or 0 for job, _ in scored)
        answers = list[list[Piece]]()
        all_scores = self._rows.scores([(job.request.model, prompt) for job, prompt in scored], top)
        for (job, prompt), scores in zip(scored, all_scores, strict=True):
            request, tokenizer = job.request, self._adapters.models[job.request.model].tokenizer
            table = prompt_scores(tokenizer, prompt, scores, request.scored or 0, as_ids=request.as_ids)
            text = request.prompt if isinstance(request.prompt, str) else tokenizer.decode_all(prompt.tolist())
            answers.append([text, TokenScores(table), Finish("length", len(prompt), 0)])
        return answers

    def _question(self, request: CompletionRequest) -> np.ndarray:
        return encoded(request, self._adapters.models[request.model].tokenizer, self._systems.get(request.model))

    def _checked(self, prompt: np.ndarray) -> np.ndarray:
        if len(prompt) > self._max_prompt:  # it is computed in one piece, which no time limit ends
            raise ConfigError(f"the prompt has {len(prompt)} tokens, allowed: {self._max_prompt} (--max-prompt)")
        return prompt

    def _end(self, answer: RunningAnswer, error: Exception | None) -> None:
        try:
            if error := error or answer.error:
                raise error
            answer.finish()
        except Exception as failure:  # noqa: BLE001  its client hears of it
            self._refuse(answer.job, failure)

    def _refuse(self, job: PendingAnswer, error: Exception) -> None:
        if isinstance(error, (RowError, ConfigError, DataError)):  # the template refuses it, or it is too long
            job.pieces.put(BadRequest(400, str(error)))
        elif isinstance(error, _NoCall):
            job.pieces.put(BadRequest(500, str(error)))
        else:  # such as a shortage of memory: the next request may be shorter
            is_over = self._is_over(error)
            reason = "the server is stopping" if is_over else f"the answer failed: {type(error).__name__}"
            job.pieces.put(BadRequest(503 if is_over else 500, reason))

    def _is_over(self, error: BaseException) -> bool:
        return isinstance(error, Preempted) or self._is_fatal(error)
