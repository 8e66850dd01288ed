"""`dualtune chat`: talk to a model, with its adapters and without."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO, cast

import click

from dualtune.base import interrupt
from dualtune.base.errors import DualtuneError, Preempted
from dualtune.base.files import expanded
from dualtune.cli.adapter_sets import base_of, load_adapters, model_or_adapter, named_directories, system_messages
from dualtune.cli.options import (
    ModelForm,
    form_options,
    no_system_option,
    sampling_options,
    system_option,
    template_option,
)
from dualtune.cli.screen import is_live, width
from dualtune.cli.terminal import pass_on, say

if TYPE_CHECKING:
    from dualtune.train.generation.sampling import Sampling
    from dualtune.use.chat import Chat

MOST_LINE = 2**20  # characters of a message
# What stands around a message of several lines: typed, or put by a terminal around what is pasted, if it is asked to.
AROUND = ('"""', '"""'), ("\x1b[200~", "\x1b[201~")
LEAST_COLUMN = 36  # of two side by side
HELP = """\
/adapter NAME  answer with this adapter   /base          answer without an adapter
/reset         forget the conversation    /save FILE     append it to FILE as a row of training data
/help          show this                  /exit          end, as Ctrl-D does; Ctrl-C stops an answer
A message of several lines: paste it, or write three quotation marks before and after it."""


@click.command("chat")
@click.argument("model", required=False)
@click.option(
    "--adapter", "adapters", multiple=True, metavar="[NAME=]DIR",
    help="An adapter directory in any layout, or a run directory. Repeatable; the first one answers.",
)  # fmt: skip
@click.option("--compare", is_flag=True, help="Let the base and each adapter answer, side by side.")
@system_option
@no_system_option
@click.option(
    "--stdin", "is_one", is_flag=True, help="Read one message from all of standard input, answer it and exit."
)
@template_option
@sampling_options(max_tokens=512)
@form_options
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # not Ctrl-C, which stops an answer
def command(
    model: str | None, adapters: tuple[str, ...], compare: bool, system: str | None, no_system: bool, is_one: bool,
    template: str, sampling: Sampling, form: ModelForm,
) -> None:  # fmt: skip
    """Talk to MODEL, which is a base model (a directory or a hub id), a run directory or an adapter directory.

    The model is loaded once, and each turn computes only the new tokens. Messages are lines of standard input; answers
    go to standard output. Pasted text is one message, and so is a text of several lines between triple quotation marks.
    /help lists the commands of the conversation.
    """
    model, adapters = model_or_adapter(model, adapters)
    directories = named_directories(adapters)
    if compare and not directories:
        raise click.UsageError("--compare needs an --adapter: there is nothing to compare the base with.")
    from dualtune.use.chat import Chat

    model = base_of(model, [*directories.values()])
    adapter_set, _ = load_adapters(model, directories, form, template)
    names = adapter_set.names if compare else adapter_set.names[1:2] or adapter_set.names
    systems = system_messages(system, directories, no_system=no_system)
    chats = [Chat(adapter_set, name, sampling, systems[name]) for name in names]
    say(f"answering   {', '.join(names)}; there are: {', '.join(adapter_set.names)}. /help, /exit", err=True)
    Conversation(chats, adapter_set.names).run(_whole_input() if is_one else _typed())


class Conversation:
    """The lines that a user types, and what each of them does."""

    def __init__(self, chats: Sequence[Chat], names: Sequence[str]) -> None:
        self._chats, self._names = chats, names

    def run(self, inputs: Iterable[Typed]) -> None:
        """Answer until the end of the input or /exit."""
        for typed in inputs:
            word, _, rest = typed.text.partition(" ")
            if typed.is_command and word == "/exit":
                return
            try:
                if typed.is_command:
                    self._obey(word, rest.strip())
                else:
                    self._answer(typed.text)
            except Preempted:
                raise
            except KeyboardInterrupt:
                pass_on("\n")
            except DualtuneError as error:  # the conversation goes on
                say(f"Error: {error}", err=True)

    def _obey(self, word: str, argument: str) -> None:
        if word == "/reset":
            for chat in self._chats:
                chat.reset()
            say("the conversation is forgotten", err=True)
        elif word == "/save":
            self._save(argument)
        elif word in ("/base", "/adapter"):
            self._switch("base" if word == "/base" else argument)
        else:
            say(HELP if word == "/help" else f"{word}: there is no such command\n{HELP}", err=True)

    def _switch(self, name: str) -> None:
        if len(self._chats) > 1:
            say("with --compare all answer; leave it out to choose one", err=True)
        elif name not in self._names:
            say(f"/adapter: got '{name}', there are: {', '.join(self._names)}", err=True)
        else:
            self._chats[0].switch(name)
            say(f"answering   {name}", err=True)

    def _save(self, name: str) -> None:
        if not name:
            return say("/save needs the name of a file", err=True)
        if not all(any(message.role == "assistant" for message in chat.messages) for chat in self._chats):
            return say("/save: there is no answer yet, so nothing that could be trained on", err=True)
        try:
            with expanded(name).open("a", encoding="utf-8") as file:
                for chat in self._chats:
                    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
                    row = {"messages": messages} | ({"adapter": chat.name} if len(self._chats) > 1 else {})
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            return say(f"/save: {name}: {error.strerror}", err=True)
        return say(f"appended to {name}", err=True)

    def _answer(self, text: str) -> None:
        if len(self._chats) > 1:
            return self._compare(text)
        with contextlib.closing(self._chats[0].ask(text)) as pieces:
            for piece in pieces:
                pass_on(piece)
        return pass_on("\n")

    def _compare(self, text: str) -> None:
        """Let all models answer. A turn that not all have answered is forgotten by all: they share a history."""
        before = [chat.messages for chat in self._chats]
        try:
            with _shown([chat.name for chat in self._chats], width() if is_live(sys.stdout) else 0) as show:
                for chat in self._chats:
                    with contextlib.closing(chat.ask(text)) as pieces:
                        for piece in pieces:
                            show(chat.name, piece)
        except BaseException:
            for chat, messages in zip(self._chats, before, strict=True):
                chat.messages = messages
            say("the turn is forgotten, as not all have answered", err=True)
            raise


@contextlib.contextmanager
def _shown(names: Sequence[str], width: int) -> Generator[Callable[[str, str], None]]:
    """Show the pieces of answers as they come: in columns, or one below the other where columns would be too narrow."""
    if _column(len(names), width) < LEAST_COLUMN:
        yield _BelowEachOther().show
        pass_on("\n")
        return
    from rich.live import Live
    from rich.text import Text

    from dualtune.cli.console import Console

    answers = dict.fromkeys(names, "")

    def show(name: str, piece: str) -> None:
        answers[name] += piece

    def draw() -> Text:  # its last lines, as many as there are on the screen
        lines = side_by_side([*answers.items()], width)
        return Text("\n".join(lines[1 - shutil.get_terminal_size().lines :]), no_wrap=True, overflow="crop")

    try:
        with Live(console=Console(sys.stdout), get_renderable=draw, transient=True):
            yield show
    finally:
        pass_on("\n".join(side_by_side([*answers.items()], width)) + "\n")


class _BelowEachOther:
    """Shows each answer under its name."""

    def __init__(self) -> None:
        self._last: str | None = None

    def show(self, name: str, piece: str) -> None:
        if name != self._last:
            pass_on(f"[{name}]\n" if self._last is None else f"\n[{name}]\n")
            self._last = name
        pass_on(piece)


def side_by_side(answers: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Return the lines of named texts in columns."""
    from itertools import zip_longest

    column = _column(len(answers), width)
    wrapped = [
        [f"[{name}]"[:column], *(part for line in text.splitlines() for part in textwrap.wrap(line, column) or [""])]
        for name, text in answers
    ]
    rows = zip_longest(*wrapped, fillvalue="")
    return [" | ".join(part.ljust(column) for part in row).rstrip() for row in rows]


def _column(count: int, width: int) -> int:
    return (width - 3 * (count - 1)) // count


class Typed(NamedTuple):
    """What a user has typed or pasted: a message, or a command of the conversation."""

    text: str
    is_command: bool = False


def _typed() -> Iterator[Typed]:
    """Yield messages and commands; on a terminal with a prompt, editing and history."""
    if cast("TextIO | None", sys.stdin) is None:  # closed by the program that started this one
        return
    is_typed = sys.stdin.isatty()
    if is_typed:
        _prepare_editing()
    while line := _next_line(is_typed):
        beginning = line.lstrip()
        if marks := next((marks for marks in AROUND if beginning.startswith(marks[0])), None):
            typed = Typed(_block(beginning.removeprefix(marks[0]), marks[1], is_typed))
        else:
            text = line.strip()
            typed = Typed(text, is_command=text.startswith("/") and "\n" not in text)
        if len(typed.text) > MOST_LINE:
            raise click.UsageError(f"a message has more than {MOST_LINE} characters.")
        if typed.text.strip():
            yield typed


def _block(text: str, end: str, is_typed: bool) -> str:
    """Return the lines up to `end`, or up to the end of the input. `text`: what is already read of them."""
    while end not in text and len(text) <= MOST_LINE and (line := _next_line(is_typed, "... ")):
        text += line
    before, _, rest = text.partition(end)
    return (before + rest).strip("\n")  # what is typed behind something pasted belongs to it


def _whole_input() -> Iterator[Typed]:
    """Yield standard input to its end as one message. UsageError if it is empty, or too long."""
    text = "" if cast("TextIO | None", sys.stdin) is None else sys.stdin.read(MOST_LINE + 1)
    if len(text) > MOST_LINE:
        raise click.UsageError(f"a message has more than {MOST_LINE} characters.")
    if not text.strip():
        raise click.UsageError("--stdin: standard input is empty; pipe the message to answer: … --stdin < FILE")
    yield Typed(text.strip("\n"))


def _prepare_editing() -> None:
    """Give `input` a history, and let what is pasted come as one text with line breaks in it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline").parse_and_bind("set enable-bracketed-paste on")


def _next_line(is_typed: bool, prompt: str = "> ") -> str:
    """Return a line with its end; an empty text at the end of the input."""
    if not is_typed:
        return sys.stdin.readline(MOST_LINE + 1)
    try:
        return input(prompt) + "\n"
    except EOFError:
        return ""
    except KeyboardInterrupt:  # of a line that is not finished
        say("", err=True)
        return "\n"
