"""The answers of the engine: one request after another, in the thread that has loaded the model."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from dualtune.base.errors import ConfigError, DataError, Preempted
from dualtune.base.http_server import BadRequest
from dualtune.data.chat.call_notations import WrittenCall, parameters_of
from dualtune.data.chat.call_reader import CallReader, TemplateCalls
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.template import WITH_TOOLS
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Engine
from dualtune.train.inference import GenerationProgress, StopTexts, stream_text
from dualtune.train.token_logprobs import token_logprobs
from dualtune.use.chat import AdapterSet
from dualtune.use.serve.requests import CompletionRequest

POLL_S = 0.2
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
class PromptScores:
    """What the model says of the prompt."""

    table: Mapping[str, Any]


Piece = str | WrittenCall | PromptScores | Finish


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


class Answers:
    """The queue of requests, and what answers them. `is_fatal`: whether an error leaves nothing that can answer."""

    def __init__(
        self, adapters: AdapterSet, *, max_tokens: int, max_prompt: int, max_waiting: int, time_limit_s: float,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
        systems: Mapping[str, str | None] | None = None,
    ) -> None:  # fmt: skip
        """`systems`: by model, the system message of a conversation that has none."""
        self.names, self._is_fatal = adapters.names, is_fatal
        self._systems = systems or {}
        self._adapters, self._time_limit_s = adapters, time_limit_s
        self._max_tokens, self._max_prompt = max_tokens, max_prompt
        self._waiting: queue.Queue[PendingAnswer] = queue.Queue(max_waiting)

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
        """Answer the next request, or return after a moment without one. Only the engine's thread calls this."""
        try:
            job = self._waiting.get(timeout=POLL_S)
        except queue.Empty:
            return
        if job.is_cancelled:
            return
        try:
            self._answer(job)
        except (RowError, ConfigError, DataError) as error:  # the template refuses it, or it is too long
            job.pieces.put(BadRequest(400, str(error)))
        except _NoCall as error:
            job.pieces.put(BadRequest(500, str(error)))
        except Exception as error:  # such as a shortage of memory: the next request may be shorter
            is_over = isinstance(error, Preempted) or self._is_fatal(error)
            reason = "the server is stopping" if is_over else f"the answer failed: {type(error).__name__}"
            job.pieces.put(BadRequest(503 if is_over else 500, reason))
            if is_over:
                raise

    def _answer(self, job: PendingAnswer) -> None:
        request, progress = job.request, GenerationProgress()
        tokenizer, ends = self._adapters.models[request.model].tokenizer, time.monotonic() + self._time_limit_s
        # An answer that must be a call is begun as one: the model continues it, and only chooses the function.
        begun = _begun(request, tokenizer) if request.must_call else BegunAnswer()
        text = AnswerText(request, _calls(request, tokenizer) if request.tools else None, begun.text)
        question = _encoded(request, tokenizer, self._systems.get(request.model))
        prompt = np.concatenate([question, np.array(begun.ids, question.dtype)])
        if len(prompt) > self._max_prompt:  # it is computed in one piece, which no time limit ends
            raise ConfigError(f"the prompt has {len(prompt)} tokens, allowed: {self._max_prompt} (--max-prompt)")
        if request.scored is not None:
            self._adapters.use(request.model)
            job.pieces.put(request.prompt if isinstance(request.prompt, str) else tokenizer.decode_all(prompt.tolist()))
            table = prompt_scores(self._adapters.engine, tokenizer, prompt, request.scored, as_ids=request.as_ids)
            job.pieces.put(PromptScores(table))
            job.pieces.put(Finish("length", len(prompt), 0))
            return
        most = min(request.max_tokens or self._max_tokens, self._max_tokens)
        pieces = stream_text(
            self._adapters.models[request.model], prompt, replace(request.sampling, max_tokens=most),
            penalties=request.penalties, progress=progress, cache=self._adapters.use(request.model),
            shown=tokenizer.call_marks if request.tools else frozenset(), first=begun.choices,
        )  # fmt: skip
        # Text goes to the client as it comes, but for what may become a stop text or a call.
        cut = StopTexts(request.stops)
        is_late = False
        for piece in pieces:
            for ready in text.feed(cut.feed(piece)):
                job.pieces.put(ready)
            is_late = time.monotonic() > ends
            if cut.found or text.is_complete or job.is_cancelled or is_late:
                pieces.close()
                break
        # What was held back is said, or is a call; an answer that ended too early for its call is an error.
        last_pieces = text.end(cut.rest())
        is_cut = is_late or progress.num_tokens >= progress.max_tokens
        is_whole = cut.found or text.is_complete or progress.is_ended or not is_cut
        if request.must_call and is_whole and not text.num_calls:
            words = "".join(piece for piece in last_pieces if isinstance(piece, str))
            raise _NoCall(f"tool_choice: the answer began as a call, and the model wrote none: {words[:200]}. {FORCED}")
        for piece in last_pieces:
            job.pieces.put(piece)
        reason = ("tool_calls" if text.num_calls else "stop") if is_whole else "length"
        job.pieces.put(Finish(reason, len(prompt), progress.num_tokens))


def _encoded(request: CompletionRequest, tokenizer: Tokenizer, system: str | None) -> np.ndarray:
    if isinstance(request.prompt, str):
        return tokenizer.encode_text(request.prompt)
    if isinstance(request.prompt, list):
        if max(request.prompt) > (largest := tokenizer.largest_id):
            raise ConfigError(f"prompt: got the token {max(request.prompt)}, the largest of this model is {largest}")
        return np.array(request.prompt, np.int32)
    if tokenizer.template is None:
        raise ConfigError(
            f"'{request.model}' has no chat template. Ask /v1/completions, or serve it with --template FILE"
        )
    messages = request.prompt
    if system is not None and all(message.role != "system" for message in messages):
        messages = (Message("system", system), *messages)
    return tokenizer.encode_chat(messages, tools=request.tools)


def _calls(request: CompletionRequest, tokenizer: Tokenizer) -> TemplateCalls:
    """Return how the model of a request writes calls. ConfigError if it is not told of tools."""
    if tokenizer.calls is None:
        raise ConfigError(
            f"tools: the chat template of '{request.model}' writes no tools. Serve it with --template: "
            f"{', '.join(WITH_TOOLS)}, or a Jinja file, if it was trained with that"
        )
    return tokenizer.calls


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """An answer that begins with a call: its tokens, their text, and those from which the model chooses the name."""

    ids: Sequence[int] = ()
    text: str = ""
    choices: Sequence[Sequence[int]] = ()


def _begun(request: CompletionRequest, tokenizer: Tokenizer) -> BegunAnswer:
    """Begin an answer up to the arguments of its call, or up to where the functions differ that may be called."""
    calls, names = _calls(request, tokenizer), [request.function] if request.function else request.names
    heads = [calls.forced(name) for name in names]
    if None in heads:
        raise ConfigError(
            f"tool_choice: an answer of '{request.model}' cannot be made to begin with a call: its chat template "
            "writes none that can be read back, or another text before an answer than it asks with. tool_choice: auto"
        )
    texts: list[list[int]] = [tokenizer.encode(head or "", special=False).tolist() for head in heads]
    same = next((i for i, tokens in enumerate(zip(*texts, strict=False)) if len({*tokens}) > 1), len(texts[0]))
    text = tokenizer.decode(texts[0][:same], tokenizer.call_marks)
    while text.endswith("\N{REPLACEMENT CHARACTER}"):  # a name has a character of several tokens
        same -= 1
        text = tokenizer.decode(texts[0][:same], tokenizer.call_marks)
    return BegunAnswer(texts[0][:same], text, [whole[same:] for whole in texts] if len(texts) > 1 else ())


class AnswerText:
    """The text of an answer: what of it is said, and the calls in it."""

    def __init__(self, request: CompletionRequest, calls: TemplateCalls | None, begun: str) -> None:
        """`begun`: how the answer begins with a call."""
        self._reader = CallReader(calls.notations, parameters_of(request.tools)) if calls else None
        self._takes_one = not request.is_parallel or request.must_call
        self.num_calls = 0
        if self._reader and calls:
            self._reader.feed(begun[calls.num_common :])

    @property
    def is_complete(self) -> bool:
        """Whether it has the only call that it may have."""
        return self._takes_one and self.num_calls > 0

    def feed(self, text: str) -> list[str | WrittenCall]:
        """Return what can be passed on when this text is added."""
        if self._reader is None:
            return [text] if text else []
        return self._allowed(self._reader.feed(text))

    def end(self, text: str) -> list[str | WrittenCall]:
        """Add the end of the text. Return what is still to be passed on."""
        return [*self.feed(text), *(self._allowed(self._reader.end()) if self._reader else [])]

    def _allowed(self, pieces: list[str | WrittenCall]) -> list[str | WrittenCall]:
        allowed: list[str | WrittenCall] = []
        for piece in pieces:
            if self.is_complete:
                break
            self.num_calls += isinstance(piece, WrittenCall)
            allowed.append(piece)
        return allowed


def prompt_scores(
    engine: Engine, tokenizer: Tokenizer, prompt: np.ndarray, top: int, *, as_ids: bool
) -> dict[str, Any]:
    """Return the table `logprobs` of a prompt (int32 [T]) in the form of OpenAI's older completions.

    Its tokens, what they are worth, and others in their place.

    `as_ids`: in place of their texts, which different tokens may share.
    """
    (said,) = token_logprobs(engine, [prompt], top)
    texts = [tokenizer.decode_all([token]) for token in prompt.tolist()]
    name: Callable[[int], str] = "token_id:{}".format if as_ids else lambda token: tokenizer.decode_all([token])
    logprobs = [None, *said.logprobs[1:].tolist()]
    tops: list[dict[str, float] | None] | None = None
    if said.top is not None:
        places = zip(said.top.tokens_Tk[1:].tolist(), said.top.logprobs_Tk[1:].tolist(), strict=True)
        own = zip(prompt[1:].tolist(), said.logprobs[1:].tolist(), strict=True)
        # The token itself is there too. Of texts that are alike the most probable token's is kept, which comes first.
        tops = [None]
        for (tokens, values), mine in zip(places, own, strict=True):
            pairs = [mine, *reversed([*zip(tokens, values, strict=True)])]
            tops.append({name(token): value for token, value in pairs})
    return {
        "tokens": [name(token) for token in prompt.tolist()], "token_logprobs": logprobs, "top_logprobs": tops,
        "text_offset": [0, *accumulate(map(len, texts))][:-1],
    }  # fmt: skip
