"""Standard output and standard error, also if they are a closed pipe, missing, or an old terminal.

All text of the commands goes through `say`, `say_styled` and `pass_on`, or through a `console.Console`. They escape
control characters, so that no name of a run, row of data or message of a library can control the terminal.

`dualtune train … | head -1` trains to the end, and so does a run after its terminal is gone: a run is worth more than
its lines on a screen.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import click

from dualtune.base.redaction import redact
from dualtune.base.text import visible

_LEAST_OF_CLICK = 50  # columns; by default click's help is never narrower


def say(text: str, err: bool = False) -> None:
    """Print a line at once, with control characters escaped. After the first failure, print nothing more."""
    _print(visible(text) + "\n", err)


def say_styled(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Print a line of parts, each with arguments for `click.style`: the only way to print colours."""
    shown = (click.style(visible(text), **style) if style else visible(text) for text, style in parts)
    _print("".join(shown) + "\n", err=False)


def pass_on(text: str) -> None:
    """Print a part of a result, escaped only for a terminal: another program gets it unchanged."""
    _print(visible(text) if sys.stdout and not sys.stdout.closed and sys.stdout.isatty() else text, err=False)


def _print(text: str, err: bool) -> None:
    stream = cast("TextIO | None", sys.stderr if err else sys.stdout)
    if stream is None or stream.closed:
        return
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):  # a stream without a file, set by another program
            _redirect_to_null(stream.fileno())
        if error.errno != errno.EPIPE and not err:  # a closed pipe is intended, a full disk is not
            say(f"standard output: {error.strerror}; the lines that follow are not shown", err=True)


def prepare_streams() -> None:
    """Open standard output and error if they are missing, and replace characters that their encoding lacks.

    Logs and warnings of libraries are escaped too: they may contain file names and values.
    """
    logging.setLogRecordFactory(_LogRecord)
    warnings.formatwarning = _formatted_warning
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if not _is_writable(fd):  # else the next opened file would get this number, and stray prints
            _redirect_to_null(fd)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        stream: object = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class _LogRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return visible(redact(super().getMessage()))


def _formatted_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{visible(redact(f'{filename}:{lineno}: {category.__name__}: {message}'))}\n"


def help_width() -> int | None:
    """Return the width for click's help if it differs from click's default."""
    columns = shutil.get_terminal_size().columns
    return max(columns - 2, 20) if columns - 2 < _LEAST_OF_CLICK else None


def _is_writable(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


def _redirect_to_null(fd: int) -> None:
    """Redirect a stream to /dev/null: for what is buffered, what follows, and what Python flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null == fd:
        os.set_inheritable(fd, True)
    else:
        os.dup2(null, fd)
        os.close(null)
