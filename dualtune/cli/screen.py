"""What a command shows while it works: its phase, the time so far, and the progress.

On a terminal this is a live line below all others; elsewhere each phase prints a line when it is done, and one that
takes long prints what it is doing every half minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from rich.cells import cell_len

from dualtune.base.text import fitted, in_columns, in_time, stamped, wrapped
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from dualtune.base.checks import Check

LEAST_BAR, MOST_BAR = 8, 30  # columns
REFRESH_HZ = 2
MOST_SILENT_S = 30.0  # in a pipe: after so long without a line, the phase is named


def width() -> int:
    """Return the columns for a line: one less than the terminal, as some wrap after the last one."""
    return shutil.get_terminal_size().columns - 1


def is_live(stream: Any) -> bool:
    """Return whether a line on this stream can be overwritten."""
    return stream is not None and not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"


def tell(text: str) -> None:
    """Print text or a table: on a terminal wrapped to its width, elsewhere unchanged."""
    say(wrapped(text, width()) if is_live(sys.stdout) else text)


def check_table(checks: Sequence[Check]) -> str:
    """Return a line for each check, with its fix below."""
    lines = in_columns([(check.level, check.name, check.found) for check in checks]).splitlines()
    indent = " " * (2 + max((len(check.level) for check in checks), default=0))
    rows = zip(lines, checks, strict=True)
    return "\n".join(line + (f"\n{indent}-> {check.fix}" if check.fix else "") for line, check in rows)


@dataclass(frozen=True, slots=True)
class Phase:
    """The state of a phase. Immutable, because another thread draws it."""

    doing: str = ""
    what: str = ""
    began: float = 0.0
    done: float = 0
    total: float = 0  # 0: unknown; 1: `done` is a share; otherwise both are counts
    ends: float | None = None  # the expected end
    fields: tuple[tuple[str, ...], ...] = ()  # numbers to show, each in several forms from long to short

    def line(self, now: float, width: int, most_bar: int = MOST_BAR) -> str:
        heads = (f"{self.doing:<11} {self.what}", f"{self.doing:<11} {self.what.rpartition('/')[2]}", self.doing)
        rest: list[tuple[str, ...]] = []
        if self.total:
            rest.append((f"{self.done:.0%}" if self.total == 1 else f"{self.done:.0f}/{self.total:.0f}",))
        if self.ends is not None and self.ends > now:
            rest.append((f"{in_time(self.ends - now)} left",))
        rest += [*self.fields, (in_time(now - self.began),)]
        head = next((head.rstrip() for head in heads if cell_len(head) <= width - len(rest[0][0]) - 2), self.doing)
        text = fitted(rest, width - cell_len(head) - 2)
        room = min(width - cell_len(head) - len(text) - 4, most_bar)
        bar = _bar(self.done / self.total, room) + "  " if self.total and room >= LEAST_BAR else ""
        return f"{head}  {bar}{text}"


def _bar(share: float, columns: int) -> str:
    filled = round(min(share, 1.0) * columns)
    return "━" * filled + "╌" * (columns - filled)


class Phases:
    """The phases of a command, one at a time."""

    def __init__(self, *, err: bool, stamps: bool = False) -> None:
        self.now = Phase()
        self.panel: tuple[str, ...] = ()  # lines above the live line; replaced, because another thread draws them
        self._err, self._stamps = err, stamps
        self._told, self._has_ended = time.monotonic(), threading.Event()
        self._live = _live(self._draw, err=err) if is_live(sys.stderr if err else sys.stdout) else None

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def begin(self, doing: str, what: str = "", since: float | None = None) -> None:
        """Begin another phase; the same phase again changes nothing."""
        if (doing, what) == (self.now.doing, self.now.what):
            return
        self.now = Phase(doing, what, time.monotonic() if since is None else since)
        if self._live:
            self._live.refresh()  # at once: the next work may block other threads, as an import does

    def update(self, done: float, total: float, *fields: tuple[str, ...], seconds_left: float | None = None) -> None:
        """Show the progress. Without `seconds_left`, the time left is estimated from the time so far."""
        now = time.monotonic()
        if seconds_left is None and done:
            seconds_left = (now - self.now.began) * (total - done) / done
        ends = now + seconds_left if seconds_left is not None and done < total else None
        self.now = replace(self.now, done=done, total=total, ends=ends, fields=fields)

    @contextlib.contextmanager
    def inside(self, doing: str, what: str = "") -> Generator[None]:
        """A phase inside the present one, which continues after it; its seconds do not count there."""
        before, began = self.now, time.monotonic()
        self.begin(doing, what)
        yield
        self.now = replace(before, began=before.began + time.monotonic() - began)

    @property
    def seconds(self) -> float:
        """Return the seconds since the phase began."""
        return time.monotonic() - self.now.began

    def finish(self, past: str, what: str = "") -> None:
        """Say what was done, and in how many seconds. `what` adds to what the phase is about."""
        if self._live or not self._err:  # with JSON, for scripts, only the live line
            what = "".join(f"{part} " for part in (self.now.what, what) if part)
            self.tell(f"{past:<11} {what}in {in_time(self.seconds, 1)}")
        self.now = Phase()

    def tell(self, line: str, when: float | None = None) -> None:
        """Print a line. In a pipe its time is before it, if `when` is given or the lines of this command have it."""
        self._told = time.monotonic()
        if self._live:
            line = wrapped(line, width())
        elif self._stamps or when is not None:
            line = stamped(line, time.time() if when is None else when)
        say(line, err=self._err)

    def tell_if_silent(self) -> None:
        """In a pipe, say what is being done if nothing has been said for long."""
        now = time.monotonic()
        if self.now.doing and now - self._told >= MOST_SILENT_S:
            self.tell(self.now.line(now, width=200, most_bar=0))

    def _watch(self) -> None:
        while not self._has_ended.wait(1.0):
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more: not this thread's to tell
                self.tell_if_silent()

    def _draw(self) -> Text:
        from rich.text import Text

        text = self.now.line(time.monotonic(), width()) if self.now.doing else ""
        return Text("\n".join([*self.panel, text]), no_wrap=True, overflow="crop")

    def __enter__(self) -> Phases:
        if self._live:
            self._live.start()
            self._live.console.show_cursor(True)  # a killed run must not leave a terminal without a cursor
        else:
            threading.Thread(target=self._watch, name="dualtune-phases", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.now, self.panel = Phase(), ()
        self._has_ended.set()
        if self._live:
            self._live.stop()


_active: Phases | None = None


@contextlib.contextmanager
def phases(*, err: bool = False, stamps: bool = False) -> Generator[Phases]:
    """Yield the phases of this command; inside another such block, the same ones. With `err` on standard error.

    `stamps`: in a pipe, each line begins with its time. If standard output carries a result, print it after the block.
    """
    global _active
    if _active is not None:
        yield _active
        return
    with Phases(err=err, stamps=stamps) as _active:
        try:
            yield _active
        finally:
            _active = None


class _Deaf:
    """A terminal that may go away, as with a lost connection: then its output is dropped and the work continues."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _live(draw: Any, *, err: bool) -> Live:
    """Return a live line; other output to the same terminal appears above it."""
    from rich.live import Live

    from dualtune.cli.console import Console

    console = Console(_Deaf(sys.stderr if err else sys.stdout))  # pyright: ignore
    return Live(
        console=console, get_renderable=draw, refresh_per_second=REFRESH_HZ, transient=True,
        redirect_stdout=not err, redirect_stderr=is_live(sys.stderr),
    )  # fmt: skip
