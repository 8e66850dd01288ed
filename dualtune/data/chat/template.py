"""Chat templates: choose one, and render a conversation to the text that the model sees.

The output equals that of transformers' `apply_chat_template` (transformers >= 5; same filters, blocks and whitespace).
Templates run in our own sandbox (`sandbox.py`), because they come with untrusted models.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

from jinja2 import meta
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.fields import shown
from dualtune.base.files import expanded
from dualtune.base.untrusted import open_file
from dualtune.config.advice import unknown_value
from dualtune.config.values import NEWEST_TEMPLATES, TemplateName
from dualtune.data.chat.row_values import KEYS_OF_REASONING
from dualtune.data.chat.sandbox import Sandbox, TemplateLimit
from dualtune.data.chat.tools import CallForm, call_form
from dualtune.data.sources.rows import RowError
from dualtune.model.formats.chat_template import MAX_TEMPLATE_BYTES, hash_of

# ----------------------------------------------------------------------------------------------------------------------
# Which template data.template chooses. Those with a name are ours, in `templates`: each writes what the template of a
# model family writes, and a test compares it with the renderings of its original.

NAMES: tuple[str, ...] = get_args(TemplateName)
# These write tools as their originals do. The others refuse them.
WITH_TOOLS = ("chatml", "llama-3.1", "mistral-small", "qwen-2.5", "qwen-3")
TEMPLATES_WITH_TOOLS = f"Set data.template to one that does: {', '.join(WITH_TOOLS)}, or a Jinja file"
_FOLDER = Path(__file__).parent / "templates"


def named_template(name: str) -> str:
    """Return the Jinja source of a name. One without tools refuses conversations that have some."""
    name = NEWEST_TEMPLATES.get(name, name)
    guard, source = ((_FOLDER / f"{stem}.jinja").read_text(encoding="utf-8") for stem in ("guard", name))
    return source if name in WITH_TOOLS else guard.replace("ADVICE", TEMPLATES_WITH_TOOLS) + source


def is_name(choice: str) -> bool:
    """Return whether a choice of a template is a name, which may be a short one such as qwen, and not a file."""
    return choice in NAMES or choice in NEWEST_TEMPLATES


def unknown(choice: str) -> str:
    """Return the message for a choice that is neither a name nor a file. Other tools write llama3 or qwen_25."""
    names = ", ".join([*NAMES, *NEWEST_TEMPLATES])
    advice = unknown_value(choice, [*NAMES])
    message = f"data.template: got '{choice}', allowed: auto, none, {names}, or an existing Jinja file"
    return f"{message}. {advice}" if advice else message


def chosen_template(own: str | Mapping[str, str] | None, choice: str) -> str | None:
    """Return the source of the template that data.template chooses, or None if there is none.

    `own`: the model's template, or several by name. ConfigError for a choice that is neither name nor usable file.
    """
    # A name comes before a file of that name, so that the meaning of a config does not depend on the directory.
    if choice == "none":
        return None
    if choice == "auto":
        if not own:
            return None
        if not isinstance(own, str) and "default" not in own:
            raise ConfigError(
                f"data.template: the model has several chat templates ({', '.join(own)}) and none is its default. "
                "Save the right one to a file and name that file"
            )
        source = own if isinstance(own, str) else own["default"]
    elif is_name(choice):
        source = named_template(choice)
    else:
        path = expanded(choice)
        if not path.is_file():
            raise ConfigError(unknown(choice))
        try:
            with open_file(path, max_bytes=MAX_TEMPLATE_BYTES) as file:
                source = file.read(MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.template: {path} is not UTF-8 (byte {error.start})") from error
        except FormatError as error:
            raise ConfigError(f"data.template: {error}") from error
    return source


# ----------------------------------------------------------------------------------------------------------------------
# A template, compiled and rendered.

MAX_SOURCE = 1 << 18  # characters; the longest in use have 25,000
SHOWN_CHARACTERS = 300
TODAY = datetime(2024, 7, 26)  # the default date of Llama's templates
# What a broken template can raise. RuntimeError includes RecursionError.
_REFUSALS = (
    TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip

Messages = Sequence[Mapping[str, Any]]
Ranges = list[tuple[int, int]]  # of characters: start, end


class ChatTemplate:
    """A compiled template. Raises ConfigError for an invalid source.

    `hash` identifies the source; `marks_turns` is true if it has `{% generation %}` blocks around assistant turns.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.hash = hash_of(source)
        self._special_tokens = dict(special_tokens)
        self._sandbox = Sandbox()
        cast(dict[str, Any], self._sandbox.globals)["strftime_now"] = _strftime_now
        self._template = _compile(self._sandbox, source)
        self.marks_turns = self._sandbox.marks_turns
        self._lock = threading.Lock()  # the sandbox can meter only one render at a time

    def variables(self) -> set[str]:
        """Return the names that the template reads and does not set before."""
        functions = {*cast(dict[str, Any], self._sandbox.globals), "raise_exception"}
        return meta.find_undeclared_variables(self._sandbox.parse(self.source)) - functions

    @cached_property
    def call_form(self) -> CallForm:
        """In which form the template takes tool calls; the caller gives them so, by `call_form.applied`."""
        return call_form(lambda messages, tools: self.render(messages, tools=tools))

    def render(self, messages: Messages, *, tools: Messages = (), add_generation_prompt: bool = False) -> str:
        """Render the conversation. Raises RowError if the template rejects it, TemplateLimit if it exceeds a limit."""
        return self.render_marked(messages, tools=tools, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(
        self, messages: Messages, *, tools: Messages = (), add_generation_prompt: bool = False
    ) -> tuple[str, Ranges]:
        """Return the text and the character ranges of its generation blocks."""
        try:
            with self._lock:
                text, turns = self._render(
                    [_message(message) for message in messages], _plain(tools), add_generation_prompt
                )
        except _REFUSALS as error:
            raise RowError(f"the chat template refuses this conversation: {_reason(error)}") from error
        ranges = [(start, start + len(turn)) for start, turn in turns]
        edges = [edge for turn in ranges for edge in turn]
        if edges != sorted(edges) or any(text[start : start + len(turn)] != turn for start, turn in turns):
            # Inside a macro or a {% set %} block the final position of a marker's text is unknown.
            raise RowError("the chat template's generation markers are nested, or inside a macro or a {% set %} block")
        return text, ranges

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


def with_variables(source: str, variables: Mapping[str, Any]) -> str:
    """Return a template in which variables have values wherever it is rendered, unless they are given others there.

    They travel in its source, so that whatever identifies or copies the template does so with them.
    """
    head = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in variables.items()
    )
    # Behind a block the first line break is not rendered.
    return source if not head or source.startswith(f"{head}\n") else f"{head}\n{source}"


def _literal(value: Any) -> str:
    """Return the Jinja literal of a JSON value."""
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, cast(Sequence[Any], value)))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _compile(sandbox: Sandbox, source: str) -> Any:
    if len(source) > MAX_SOURCE:
        raise ConfigError(f"data.template: the chat template has {len(source)} characters, allowed: {MAX_SOURCE}")
    if any("\ud800" <= character <= "\udfff" for character in source):
        raise ConfigError("data.template: the chat template contains an unpaired surrogate, which is not valid text")
    try:
        return sandbox.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"data.template: line {error.lineno} of the chat template: {_reason(error)}") from error
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ConfigError(f"data.template: the chat template cannot be compiled: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Format an error on one line. A template controls the message, so it is not trusted."""
    message = error.message if isinstance(error, TemplateSyntaxError) else str(error)
    return shown(" ".join(((message or "")[:SHOWN_CHARACTERS] or type(error).__name__).split()), SHOWN_CHARACTERS)


def _strftime_now(format: str) -> str:
    """Format the date for a template. It is fixed, so that a run resumed tomorrow has the same data."""
    if len(format) > 100:
        raise TemplateLimit("a date format of more than 100 characters")
    return TODAY.strftime(format)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message as transformers does, with the reasoning under every key in use.

    Nulls are left out, but not as content beside calls: some templates ask for that.
    """
    may_be_null = {"content"} if message.get("tool_calls") else ()
    fields = {key: _plain(value) for key, value in message.items() if value is not None or key in may_be_null}
    for name in KEYS_OF_REASONING:
        if name in fields:
            return {"thinking": fields[name]} | fields | {"reasoning_content": fields[name]}
    return fields


def _plain(value: Any) -> Any:
    """Copy a value to plain JSON types, because a template must not reach the methods of other types."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    raise TypeError(f"a message holds a {type(value).__name__}, which is not JSON")
