"""The answers of the engine: one request after another, in the thread that has loaded the model."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dualtune.data.chat.conversations import Message
from dualtune.data.sources.rows import RowError
from dualtune.errors import ConfigError, DataError, Preempted
from dualtune.evaluate.adapter_set import AdapterSet
from dualtune.evaluate.inference import GenerationProgress, stream_text
from dualtune.serve.requests import BadRequest, CompletionRequest

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer."""

    reason: str  # "stop": the model or a stop text; "length": as many tokens as allowed, or as fit into the time
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class PendingAnswer:
    """A request on its way. The thread of the connection reads `pieces`: texts, then a Finish or an error."""

    request: CompletionRequest
    pieces: queue.SimpleQueue[str | Finish | Exception] = field(default_factory=lambda: queue.SimpleQueue())
    is_cancelled: bool = False  # the client is gone

    def answer(self, client_is_gone: Callable[[], bool]) -> Iterator[str | Finish]:
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
        except Exception as error:  # such as a shortage of memory: the next request may be shorter
            is_over = isinstance(error, Preempted) or self._is_fatal(error)
            reason = "the server is stopping" if is_over else f"the answer failed: {type(error).__name__}"
            job.pieces.put(BadRequest(503 if is_over else 500, reason))
            if is_over:
                raise

    def _answer(self, job: PendingAnswer) -> None:
        request, progress = job.request, GenerationProgress()
        prompt, ends = self._encoded(request), time.monotonic() + self._time_limit_s
        if len(prompt) > self._max_prompt:  # it is computed in one piece, which no time limit ends
            raise ConfigError(f"the prompt has {len(prompt)} tokens, allowed: {self._max_prompt} (--max-prompt)")
        pieces = stream_text(
            self._adapters.models[request.model], prompt,
            max_tokens=min(request.max_tokens or self._max_tokens, self._max_tokens), temperature=request.temperature,
            top_p=request.top_p, seed=request.seed, cache=self._adapters.use(request.model), progress=progress,
        )  # fmt: skip
        cut = StopTexts(request.stops)
        is_late = False
        for piece in pieces:
            if text := cut.feed(piece):
                job.pieces.put(text)
            is_late = time.monotonic() > ends
            if cut.found or job.is_cancelled or is_late:
                pieces.close()
                break
        if rest := cut.rest():
            job.pieces.put(rest)
        is_whole = cut.found or not (is_late or progress.num_tokens >= progress.max_tokens)
        job.pieces.put(Finish("stop" if is_whole else "length", len(prompt), progress.num_tokens))

    def _encoded(self, request: CompletionRequest) -> np.ndarray:
        tokenizer = self._adapters.models[request.model].tokenizer
        if isinstance(request.prompt, str):
            return tokenizer.encode_text(request.prompt)
        if tokenizer.template is None:
            raise ConfigError(
                f"'{request.model}' has no chat template. Ask /v1/completions, or serve it with --template FILE"
            )
        system = self._systems.get(request.model)
        if system is None or any(message.role == "system" for message in request.prompt):
            return tokenizer.encode_chat(request.prompt)
        return tokenizer.encode_chat((Message("system", system), *request.prompt))


class StopTexts:
    """Ends a text before the stop text that is complete first. What may be the beginning of one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def feed(self, piece: str) -> str:
        """Return what of the text so far can be passed on."""
        text = self._held + piece
        # The one that ends first, as if the text came character by character.
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        longest = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]

    def rest(self) -> str:
        """Return what was held back at the end of the text."""
        held, self._held = self._held, ""
        return held
