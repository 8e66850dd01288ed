"""What a client may ask: bodies of POST requests, read without trust. Every key is honoured, or refused by name.

The form is that of OpenAI's API reference (chat completions, and the older completions).
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dualtune.data.chat.conversations import Message

MAX_BODY = 1 << 20  # bytes
MAX_MESSAGES, MAX_TEXT = 1000, 1 << 19  # characters of a message
MAX_STOPS, MAX_STOP = 8, 200


class BadRequest(Exception):
    """A request that cannot be answered: the HTTP status, the message, and the key that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _TextPart(_Strict):
    type: Literal["text"]
    text: Annotated[str, Field(max_length=MAX_TEXT)]


class _ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_TEXT)] | list[_TextPart]


class _StreamOptions(_Strict):
    include_usage: bool = False


class _Body(_Strict):
    """What both kinds of request have. A key with a single allowed value is accepted where that is what happens."""

    model: Annotated[str, Field(max_length=500)]
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
        | list[Annotated[str, Field(min_length=1, max_length=MAX_STOP)]]
        | None
    ) = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    n: Literal[1] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None


class _ChatBody(_Body):
    messages: Annotated[list[_ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Literal[False] | None = None


class _TextBody(_Body):
    prompt: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request that has been checked. `prompt` is a conversation, or a plain text to continue."""

    model: str
    prompt: tuple[Message, ...] | str
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)


def read_request(raw: bytes, *, is_chat: bool) -> CompletionRequest:
    """Read the body of a request. BadRequest, with the first wrong key, for anything that is not as it must be."""
    try:
        body = (_ChatBody if is_chat else _TextBody).model_validate(_parsed(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "constrained")))[:200]
        text = "is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        raise BadRequest(400, f"{param or 'body'}: {text}"[:500], param or None) from None
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise BadRequest(400, f"stop: got {len(stops)} texts, allowed: {MAX_STOPS}", "stop")
    prompt, most = (_messages(body), body.max_completion_tokens) if isinstance(body, _ChatBody) else (body.prompt, None)
    return CompletionRequest(
        body.model, prompt, most or body.max_tokens, 1.0 if body.temperature is None else body.temperature,
        body.top_p or 1.0, secrets.randbits(32) if body.seed is None else body.seed, tuple(stops), bool(body.stream),
        body.stream_options is not None and body.stream_options.include_usage,
    )  # fmt: skip


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"body: is not JSON: {error}"[:200]) from None
    if not isinstance(body, dict):
        raise BadRequest(400, "body: must be a JSON object")
    return cast("dict[str, Any]", body)


def _messages(body: _ChatBody) -> tuple[Message, ...]:
    found: list[Message] = []
    for message in body.messages:
        content = message.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        found.append(Message("system" if message.role == "developer" else message.role, text))
    return tuple(found)
