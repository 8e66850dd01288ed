"""`dualtune chat`: talk to a model, with its adapters and without."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import click

from dualtune import interrupt
from dualtune.cli.adapters.adapter_sets import load_adapters, named_directories, with_named_base
from dualtune.cli.options import (
    dtype_option,
    platform_option,
    quantization_option,
    seed_option,
    temperature_option,
    template_option,
    top_p_option,
)
from dualtune.cli.output.terminal import pass_on, say

if TYPE_CHECKING:
    from dualtune.evaluate.chat import Chat

MOST_LINE = 2**20  # characters of a message
LEAST_COLUMN = 36  # of two side by side
HELP = """\
/adapter NAME  answer with this adapter   /base          answer without an adapter
/reset         forget the conversation    /save FILE     append it to FILE as a row of training data
/help          show this                  /exit          end, as Ctrl-D does; Ctrl-C stops an answer"""


@click.command("chat")
@click.argument("model")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="[NAME=]DIR",
    help="An adapter directory of any layout, or a run; repeatable. The first one answers.",
)
@click.option("--compare", is_flag=True, help="Let the base and each adapter answer, side by side.")
@click.option("--system", metavar="TEXT", help="The system message.")
@template_option
@temperature_option
@top_p_option
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Of each answer.")
@seed_option
@dtype_option
@quantization_option
@platform_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # not Ctrl-C, which stops an answer
def command(
    model: str, adapters: tuple[str, ...], compare: bool, system: str | None, template: str, temperature: float,
    top_p: float, max_tokens: int, seed: int, dtype: str, quantization: str, platform: str,
) -> None:  # fmt: skip
    """Talk to MODEL (a directory or a hub id), or to the adapter of a run or a directory with the base that it names.

    The model is loaded once, and only what is new is computed each turn.

    Messages are lines of standard input, answers go to standard output. /help lists the commands of the conversation.
    """
    model, adapters = with_named_base(model, adapters)
    directories = named_directories(adapters)
    if compare and not directories:
        raise click.UsageError("--compare needs an --adapter: there is nothing to compare the base with.")
    from dualtune.evaluate.chat import Chat, Sampling

    found, _ = load_adapters(model, directories, platform, dtype=dtype, quantization=quantization, template=template)
    sampling = Sampling(max_tokens, temperature, top_p, seed)
    names = found.names if compare else found.names[1:2] or found.names
    chats = [Chat(found, name, sampling, system) for name in names]
    say(f"answering   {', '.join(names)}; there are: {', '.join(found.names)}. /help, /exit", err=True)
    Conversation(chats, found.names).run()


class Conversation:
    """The lines that a user types, and what each of them does."""

    def __init__(self, chats: Sequence[Chat], names: Sequence[str]) -> None:
        self._chats, self._names = chats, names

    def run(self) -> None:
        """Answer until the end of the input or /exit."""
        from dualtune.errors import DualtuneError, Preempted

        for line in _lines():
            word, _, rest = line.partition(" ")
            if word == "/exit":
                return
            try:
                if line.startswith("/"):
                    self._obey(word, rest.strip())
                else:
                    self._answer(line)
            except Preempted:
                raise
            except KeyboardInterrupt:
                pass_on("\n")
            except DualtuneError as error:  # the conversation goes on
                say(f"Error: {error}", err=True)

    def _obey(self, word: str, rest: str) -> None:
        if word == "/reset":
            for chat in self._chats:
                chat.reset()
            say("the conversation is forgotten", err=True)
        elif word == "/save":
            self._save(rest)
        elif word in ("/base", "/adapter"):
            self._switch("base" if word == "/base" else rest)
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
        if not all(any(each.role == "assistant" for each in chat.messages) for chat in self._chats):
            return say("/save: there is no answer yet, so nothing that could be trained on", err=True)
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                for chat in self._chats:
                    messages = [{"role": each.role, "content": each.content} for each in chat.messages]
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
        """Let all answer. A turn that not all have answered is forgotten by all, so that they talk about the same."""
        before = [chat.messages for chat in self._chats]
        try:
            with _shown([chat.name for chat in self._chats], _width()) as show:
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
    import shutil

    from rich.live import Live
    from rich.text import Text

    from dualtune.cli.output.console import Console

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
    import textwrap
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


def _width() -> int:
    from dualtune.cli.output.screen import is_live, width

    return width() if is_live(sys.stdout) else 0


def _lines() -> Iterator[str]:
    """Yield the messages; on a terminal with a prompt, editing and history."""
    if cast("TextIO | None", sys.stdin) is None:  # closed by the program that started this one
        return
    is_typed = sys.stdin.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives `input` a history
    while line := _next_line(is_typed):
        if len(line) > MOST_LINE:
            raise click.UsageError(f"a message has more than {MOST_LINE} characters.")
        if line.strip():
            yield line.strip()


def _next_line(is_typed: bool) -> str:
    """Return a line with its end; an empty text at the end of the input."""
    if not is_typed:
        return sys.stdin.readline(MOST_LINE + 1)
    try:
        return input("> ") + "\n"
    except EOFError:
        return ""
    except KeyboardInterrupt:  # of a line that is not finished
        say("", err=True)
        return "\n"
