"""Chat templates: what turns a conversation into the text that the model sees.

A template renders to what transformers' `apply_chat_template` gives (transformers >= 5; same filters, blocks and
whitespace), in our own sandbox (`template_sandbox.py`), because it comes with a model that nobody vouches for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from dualtune.adapter.formats.chat_template import hash_of
from dualtune.data.chat.template_meter import TemplateLimit
from dualtune.data.chat.template_sandbox import Sandbox
from dualtune.data.sources.rows import RowError
from dualtune.errors import ConfigError
from dualtune.io.fields import shown

MAX_SOURCE = 1 << 18  # characters; the longest in use have 25,000
SHOWN_CHARACTERS = 300
TODAY = datetime(2024, 7, 26)  # what Llama's templates write where they are told no date
# Names for the reasoning behind an answer. Whichever a row uses, a template finds it under the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")
# What a broken template can raise. RuntimeError holds RecursionError.
_REFUSALS = (
    TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]


class ChatTemplate:
    """A compiled template. ConfigError where the source is no template.

    `hash` tells templates apart; `marks_turns` says whether it has `{% generation %}` around what the assistant says.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.hash = hash_of(source)
        self._special_tokens = dict(special_tokens)
        self._sandbox = Sandbox()
        cast(dict[str, Any], self._sandbox.globals)["strftime_now"] = _strftime_now
        self._template = _compile(self._sandbox, source)
        self.marks_turns = self._sandbox.marks_turns
        self._lock = threading.Lock()  # the sandbox meters one render at a time

    def render(self, messages: Messages, *, tools: Messages = (), add_generation_prompt: bool = False) -> str:
        """The conversation as text. RowError where the template refuses it, TemplateLimit where it runs away."""
        return self.render_marked(messages, tools=tools, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(
        self, messages: Messages, *, tools: Messages = (), add_generation_prompt: bool = False
    ) -> tuple[str, Spans]:
        """The text, and the character spans of its generation blocks."""
        try:
            with self._lock:
                text, turns = self._render(
                    [_message(message) for message in messages], _plain(tools), add_generation_prompt
                )
        except _REFUSALS as error:
            raise RowError(f"the chat template refuses this conversation: {_reason(error)}") from error
        spans = [(start, start + len(turn)) for start, turn in turns]
        edges = [edge for span in spans for edge in span]
        if edges != sorted(edges) or any(text[start : start + len(turn)] != turn for start, turn in turns):
            # Inside a macro or a {% set %} block a marker cannot know where its text will end up.
            raise RowError("the chat template's generation markers are nested, or not where the text is written")
        return text, spans

    def _render(self, messages: list[Any], tools: list[Any], add_generation_prompt: bool) -> tuple[str, Any]:
        sandbox = self._sandbox
        sandbox.written, sandbox.turns = 0, []
        sandbox.meter.start((messages, tools))
        context = self._template.new_context(
            self._special_tokens
            | {"messages": messages, "tools": tools or None, "documents": None}
            | {"add_generation_prompt": add_generation_prompt}
        )
        pieces: list[str] = []
        for piece in self._template.root_render_func(context):
            pieces.append(piece)
            sandbox.written += len(piece)
        return "".join(pieces), sandbox.turns


def _compile(sandbox: Sandbox, source: str) -> Any:
    if len(source) > MAX_SOURCE:
        raise ConfigError(f"data.template: the chat template has {len(source)} characters, allowed: {MAX_SOURCE}")
    if any("\ud800" <= character <= "\udfff" for character in source):
        raise ConfigError("data.template: the chat template holds half a surrogate pair, which no file can")
    try:
        return sandbox.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"data.template: line {error.lineno} of the chat template: {_reason(error)}") from error
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ConfigError(f"data.template: the chat template cannot be compiled: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """On one line; a template writes into it what it likes."""
    said = error.message if isinstance(error, TemplateSyntaxError) else str(error)
    return shown(" ".join(((said or "")[:SHOWN_CHARACTERS] or type(error).__name__).split()), SHOWN_CHARACTERS)


def _strftime_now(format: str) -> str:
    """The date that a template asks for. It is fixed, or a run that goes on tomorrow would have other data."""
    if len(format) > 100:
        raise TemplateLimit("a date format of more than 100 characters")
    return TODAY.strftime(format)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it to a template: without nulls, its reasoning under every name in use."""
    fields = {key: _plain(value) for key, value in message.items() if value is not None}
    for name in REASONING:
        if name in fields:
            return {"thinking": fields[name]} | fields | {"reasoning_content": fields[name]}
    return fields


def _plain(value: Any) -> Any:
    """A copy out of JSON's types: a template must not reach the methods of anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    raise TypeError(f"a message holds a {type(value).__name__}, which is not JSON")
