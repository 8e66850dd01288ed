"""What a client may ask: bodies of POST requests, read without trust. Every key is honoured, or refused by name.

The form is that of OpenAI's API reference (chat completions, and the older completions). A few keys that clients send
and that cannot change an answer are accepted, and a header of the answer names them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dualtune.base.http_server import BadRequest, invalid_body, json_object
from dualtune.data.chat.conversations import Message, RowReading, asked_nulls, read_messages, read_tools
from dualtune.data.sources.rows import RowError
from dualtune.train.generation.sampling import Penalties, Sampling

MAX_BODY = 1 << 20  # bytes
MAX_MESSAGES, MAX_TEXT = 1000, 1 << 19  # characters of a message
MAX_STOPS, MAX_STOP = 8, 200
MAX_LOGPROBS, MAX_TOP_LOGPROBS = 256, 20  # tokens in each place; of a chat as in OpenAI's API
MAX_TOOLS, MAX_CALLS = 128, 128  # of a request, of a message
# Accepted and without an effect, unless the value is one that says so itself: `store: false` asks for nothing.
WITHOUT_EFFECT = ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_NOTHING: tuple[Any, ...] = (None, False, "auto", "default")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _TextPart(_Strict):
    type: Literal["text"]
    text: Annotated[str, Field(max_length=MAX_TEXT)]


class _CalledFunction(_Strict):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Annotated[str, Field(max_length=MAX_TEXT)]


class _Call(_Strict):
    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Field(max_length=MAX_TEXT)] | list[_TextPart] | None = None
    tool_calls: Annotated[list[_Call], Field(max_length=MAX_CALLS)] | None = None  # of an assistant
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None  # of a tool
    # What a client sends back of an answer.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class _Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]
    description: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # true: named in the header, nothing keeps the arguments to the schema


class _Tool(_Strict):
    type: Literal["function"]
    function: _Function


class _ChosenName(_Strict):
    name: str


class _ChosenFunction(_Strict):
    type: Literal["function"]
    function: _ChosenName


class _Format(_Strict):
    type: Literal["text"]


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Body(_Strict):
    """What both kinds of request have. A key with a single allowed value is accepted where that is what happens."""

    model: Annotated[str, Field(max_length=500)]
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # these two as in vLLM and llama.cpp; -1 and 0 are all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
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
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Annotated[str, Field(max_length=100)] | None = None
    safety_identifier: Annotated[str, Field(max_length=500)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=500)] | None = None


class _ChatBody(_Body):
    messages: Annotated[list[_ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: _Format | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ChosenFunction | None = None
    parallel_tool_calls: bool | None = None


class _TextBody(_Body):
    prompt: (
        Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_TEXT)]
    )  # a text, or token ids
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool | None = None  # as in vLLM: `token_id:5` in place of a token's text


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request that has been checked. `prompt` is a conversation, or a plain text or its token ids to continue."""

    model: str
    prompt: tuple[Message, ...] | str | list[int]
    max_tokens: int | None
    sampling: Sampling  # but for the number of tokens
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    penalties: Penalties | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # that may be called
    must_call: bool = False
    function: str | None = None  # the one that must be called
    is_parallel: bool = True  # an answer may have several calls
    logprobs: int | None = None  # of the answer's tokens, with so many others in the place of each; None: not asked for
    scored: int | None = None  # so many tokens in the place of each of the prompt, which is not continued; None: it is
    as_ids: bool = False  # their ids in place of their texts
    ignored: tuple[str, ...] = ()  # keys of the request without an effect

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, tuple)

    @property
    def names(self) -> list[str]:
        """The functions that may be called."""
        return [tool["function"]["name"] for tool in self.tools]


def read_request(raw: bytes, *, is_chat: bool) -> CompletionRequest:
    """Read the body of a request. BadRequest, with the first wrong key, for anything that is not as it must be."""
    try:
        body = (_ChatBody if is_chat else _TextBody).model_validate(json_object(raw))
    except ValidationError as error:
        raise invalid_body(error, lambda key: "is not supported") from None
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise BadRequest(400, f"stop: got {len(stops)} texts, allowed: {MAX_STOPS}", "stop")
    options: dict[str, Any] = {}
    if isinstance(body, _ChatBody):
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            got = f"got {body.max_completion_tokens}, and max_tokens: {body.max_tokens}"
            raise BadRequest(400, f"max_completion_tokens: {got}; send one of the two", "max_completion_tokens")
        options = {**_calls(body), "logprobs": _chat_logprobs(body)}
        prompt, most = _messages(body, options["tools"]), body.max_completion_tokens
    else:
        prompt, most, options = body.prompt, None, _scores(body)
    penalties = Penalties(body.frequency_penalty or 0.0, body.presence_penalty or 0.0)
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else body.temperature, top_p=body.top_p or 1.0,
        seed=secrets.randbits(32) if body.seed is None else body.seed, top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
    )  # fmt: skip
    return CompletionRequest(
        body.model, prompt, most or body.max_tokens, sampling, tuple(stops), bool(body.stream),
        body.stream_options is not None and body.stream_options.include_usage,
        penalties if penalties != Penalties() else None, ignored=_ignored(body), **options,
    )  # fmt: skip


def _scores(body: _TextBody) -> dict[str, Any]:
    """Return what a request says of scoring its prompt, by the names of `CompletionRequest`."""
    is_scored = body.max_tokens == 0
    if bool(body.echo) != is_scored:
        raise BadRequest(400, "echo: is supported with max_tokens: 0 alone, which scores the prompt", "echo")
    if body.stream and is_scored:
        raise BadRequest(400, "stream: a prompt that is scored is answered at once; allowed: false", "stream")
    return {
        "scored": body.logprobs or 0 if is_scored else None, "logprobs": None if is_scored else body.logprobs,
        "as_ids": bool(body.return_tokens_as_token_ids),
    }  # fmt: skip


def _chat_logprobs(body: _ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest(400, "top_logprobs: needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _ignored(body: _Body) -> tuple[str, ...]:
    """Return the keys that have no effect and whose value asks for one."""
    tools = (body.tools or []) if isinstance(body, _ChatBody) else []
    strict = ["tools.function.strict"] if any(tool.function.strict for tool in tools) else []
    return (*(key for key in WITHOUT_EFFECT if getattr(body, key) not in _NOTHING), *strict)


def _calls(body: _ChatBody) -> dict[str, Any]:
    """Return what a request says of calls, by the names of `CompletionRequest`."""
    schemas = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or []]
    names, choice = [tool["function"]["name"] for tool in schemas], body.tool_choice
    function = choice.function.name if isinstance(choice, _ChosenFunction) else None
    if len(set(names)) < len(names):
        raise BadRequest(400, "tools: two functions have the same name", "tools")
    if function is not None and function not in names:
        raise BadRequest(
            400, f"tool_choice: got '{function[:100]}', tools has: {', '.join(names)[:300]}", "tool_choice"
        )
    if choice == "required" and not names:
        raise BadRequest(400, "tool_choice: a call is required, but there are no tools", "tool_choice")
    try:
        tools = read_tools(schemas)
    except RowError as error:
        raise BadRequest(400, str(error), "tools") from None
    return {
        "tools": () if choice == "none" else tools,
        "must_call": choice == "required" or function is not None,
        "function": function,
        "is_parallel": body.parallel_tool_calls is not False,
    }


def _messages(body: _ChatBody, tools: tuple[Mapping[str, Any], ...]) -> tuple[Message, ...]:
    called: set[str] = set()  # the ids of calls that a result may name
    for number, message in enumerate(body.messages):
        if message.role == "tool" and (number == 0 or body.messages[number - 1].role not in ("assistant", "tool")):
            at = f"messages.{number}.role"
            raise BadRequest(400, f"{at}: a tool message must follow an assistant message or another tool message", at)
        for key, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(message, key) is not None and message.role != role:
                at = f"messages.{number}.{key}"
                raise BadRequest(400, f"{at}: allowed in a message of the role {role}, this is of {message.role}", at)
        if message.content is None and not message.tool_calls and message.role != "tool":
            at = f"messages.{number}.content"
            raise BadRequest(400, f"{at}: may be null beside tool_calls and in the result of a tool", at)
        called |= {call.id for call in message.tool_calls or [] if call.id is not None}
        if message.tool_call_id is not None and message.tool_call_id not in called:
            at = f"messages.{number}.tool_call_id"
            raise BadRequest(400, f"{at}: got '{message.tool_call_id}', no call before it has this id", at)
    rows = [message.model_dump(exclude_none=True, exclude={"annotations"}) for message in body.messages]
    rows = [row if row["role"] != "assistant" or row.get("content") else {**row, "content": ""} for row in rows]
    try:
        return asked_nulls(read_messages(rows, "messages"), tools, RowReading())
    except RowError as error:
        raise BadRequest(400, f"messages: {error}"[:500], "messages") from None
