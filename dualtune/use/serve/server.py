"""The HTTP side of `dualtune serve`: the JSON of requests, answers and errors.

Each connection has a thread, which only waits: for its request, then for the engine.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from urllib.parse import unquote

from dualtune.base.http_server import ApiHandler, ApiServer, BadRequest
from dualtune.data.chat.call_notations import WrittenCall
from dualtune.use.serve.answers import Answers, Finish, PendingAnswer, TokenScores
from dualtune.use.serve.requests import MAX_BODY, CompletionRequest, read_request

PATHS = {"/v1/chat/completions": True, "/v1/completions": False}  # path -> whether it is a chat
IGNORED = "X-Dualtune-Ignored"  # a header of answers: keys of the request without an effect
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


class CompletionServer(ApiServer):
    """A server whose requests are answered by `answers`. `tell` gets a line for each request."""

    def __init__(self, host: str, port: int, answers: Answers, *, key: str | None, tell: Callable[[str], None]) -> None:
        self.answers = answers
        super().__init__(host, port, Handler, key=key, tell=tell)


class Handler(ApiHandler):
    """One connection."""

    server: CompletionServer  # pyright: ignore[reportIncompatibleVariableOverride]
    _has_begun = False  # a stream: its status is sent

    def do_GET(self) -> None:
        """List the models, or say that the server is there."""
        self._has_begun = False
        self.answer_with(self._get)

    def do_POST(self) -> None:
        """Answer a request."""
        self._has_begun = False
        self.answer_with(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a malformed request, or another method."""
        self._has_begun = False
        super().send_error(code, message, explain)

    def _get(self) -> str:
        self.read_no_body()
        if self.path == "/health":
            self.send_table(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self.send_table(200, {"object": "list", "data": [_model(name) for name in self.server.answers.names]})
        elif self.path.startswith("/v1/models/"):
            name = unquote(self.path.removeprefix("/v1/models/"))
            self.server.answers.check_model(name)
            self.send_table(200, _model(name))
        else:
            raise BadRequest(404, f"there is no {self.path[:100]}. GET: /v1/models, /health. POST: {', '.join(PATHS)}")
        return "200"

    def _post(self) -> str:
        body = self.read_body(MAX_BODY)
        if self.path not in PATHS:
            raise BadRequest(404, f"there is no {self.path[:100]} to POST to, there are: {', '.join(PATHS)}")
        request = read_request(body, is_chat=PATHS[self.path])
        job = self.server.answers.submit(request)
        try:
            finish = self._stream(job) if request.stream else self._whole(job)
        except BaseException:
            job.is_cancelled = True
            raise
        return f"200 {request.model}: {finish.prompt_tokens} + {finish.completion_tokens} tokens, {finish.reason}"

    def _whole(self, job: PendingAnswer) -> Finish:
        text, finish, scores = "", None, None
        calls: list[WrittenCall] = []
        for piece in job.answer(self.client_is_gone):
            if isinstance(piece, Finish):
                finish = piece
            elif isinstance(piece, WrittenCall):
                calls.append(piece)
            elif isinstance(piece, TokenScores):
                scores = piece.table
            else:
                text += piece
        assert finish is not None
        head, choice = _head(job.request), _choice(job.request, text, calls, finish.reason, scores)
        self.send_table(200, head | {"choices": [choice], "usage": _usage(finish)}, _ignored_keys(job.request))
        return finish

    def _stream(self, job: PendingAnswer) -> Finish:
        """Send server-sent events: a piece of text each, then the end."""
        request, pieces = job.request, job.answer(self.client_is_gone)
        first = next(pieces)  # an error that comes before the first piece still has its own status
        self.send_response(200)
        for name, value in (("Content-Type", "text/event-stream"), ("Cache-Control", "no-store"),
                            ("Transfer-Encoding", "chunked"), *_ignored_keys(request)):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self._has_begun = True
        head = _head(request)
        finish, num_calls, scores = None, 0, None
        for piece in chain([first], pieces):
            if isinstance(piece, TokenScores):
                scores = piece.table  # with the next event
                continue
            deltas: Iterable[Mapping[str, Any]] = [{}]
            if isinstance(piece, Finish):
                finish = piece
            elif isinstance(piece, WrittenCall):
                deltas, num_calls = _call_deltas(piece, num_calls), num_calls + 1
            else:
                deltas = [{"role": "assistant", "content": piece}]
            for delta in deltas:
                self._event(head | {"choices": [_delta(request, delta, finish and finish.reason, scores)]})
                scores = None
        assert finish is not None
        if request.include_usage:
            self._event(head | {"choices": [], "usage": _usage(finish)})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        return finish

    def _event(self, table: Mapping[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(table).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def error_table(self, error: BadRequest) -> Mapping[str, Any]:
        """Return an error as OpenAI's API writes it."""
        kind = ERROR_TYPES.get(error.status, "invalid_request_error")
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": None}}

    def fail(self, error: BadRequest) -> None:
        """Send an error, as the last event of a stream that has begun."""
        if not self._has_begun:
            super().fail(error)
            return
        self._event(self.error_table(error))
        self._chunk(b"")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "dualtune"}


def _ignored_keys(request: CompletionRequest) -> list[tuple[str, str]]:
    """Return the header that names keys without an effect, if the request has any."""
    return [(IGNORED, ", ".join(request.ignored))] if request.ignored else []


def _head(request: CompletionRequest) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if request.stream else "chat.completion") if request.is_chat else "text_completion"
    prefix = "chatcmpl" if request.is_chat else "cmpl"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": request.model}


def _choice(
    request: CompletionRequest, text: str, calls: Sequence[WrittenCall], reason: str, scores: Mapping[str, Any] | None
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message |= {"content": text or None, "tool_calls": [_call(call) for call in calls]}
    content = {"message": message} if request.is_chat else {"text": text}
    return {"index": 0, **content, "finish_reason": reason, "logprobs": scores}


def _call(call: WrittenCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    id = call.id or f"call_{uuid.uuid4().hex[:24]}"
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_deltas(written: WrittenCall, index: int) -> Iterator[dict[str, Any]]:
    """Yield the name of a call, then its arguments, as clients expect to join them."""
    call = _call(written)
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    begin = call | {"index": index, "function": {"name": name, "arguments": ""}}
    yield {"role": "assistant", "content": None, "tool_calls": [begin]}
    yield {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def _delta(
    request: CompletionRequest, delta: Mapping[str, Any], reason: str | None, scores: Mapping[str, Any] | None
) -> dict[str, Any]:
    content: dict[str, Any] = {"delta": delta} if request.is_chat else {"text": delta.get("content", "")}
    return {"index": 0, **content, "finish_reason": reason, "logprobs": scores}


def _usage(finish: Finish) -> dict[str, int]:
    prompt, completion = finish.prompt_tokens, finish.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
