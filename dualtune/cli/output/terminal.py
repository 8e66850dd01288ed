"""Standard output and standard error, wherever they lead: a pipe that was closed, nowhere, or an old terminal.

All text of the commands leaves through `say`, `say_styled` and `pass_on`, or through a `console.Console`. They escape
what could steer a terminal, so that no name of a run, no row of data and no message of a library can.

`dualtune train … | head -1` trains to the end, and so does a run whose terminal is gone: a run is worth more than its
lines on a screen.
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

from dualtune.text.escape import visible
from dualtune.text.redaction import redact

_LEAST_OF_CLICK = 50  # columns; click's help is never narrower by itself


def say(text: str, err: bool = False) -> None:
    """Print a line at once, with what could steer a terminal escaped. From the first one that fails on, be silent."""
    _print(visible(text) + "\n", err)


def say_styled(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Print a line of parts, each with what `click.style` takes: the only way for colours to reach a terminal."""
    shown = (click.style(visible(text), **style) if style else visible(text) for text, style in parts)
    _print("".join(shown) + "\n", err=False)


def pass_on(text: str) -> None:
    """Print a part of a result that another program may want as it is: only a terminal gets it escaped."""
    _print(visible(text) if sys.stdout and not sys.stdout.closed and sys.stdout.isatty() else text, err=False)


def _print(text: str, err: bool) -> None:
    stream = cast("TextIO | None", sys.stderr if err else sys.stdout)
    if stream is None or stream.closed:
        return
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):  # a stream that is no file, put there by another program
            _lead_nowhere(stream.fileno())
        if error.errno != errno.EPIPE and not err:  # a closed pipe was somebody's wish, a full disk was not
            say(f"standard output: {error.strerror}; the lines that follow are not shown", err=True)


def prepare_streams() -> None:
    """Make standard output and error exist, and replace the characters that their encoding lacks.

    What libraries log and warn is escaped as well: there may be names of files in it, and values.
    """
    logging.setLogRecordFactory(_LogRecord)
    warnings.formatwarning = _formatted_warning
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if not _is_writable(fd):  # left so, the next file that is opened would get the number, and stray prints
            _lead_nowhere(fd)
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
    """The width of click's help where it is not what click takes."""
    columns = shutil.get_terminal_size().columns
    return max(columns - 2, 20) if columns - 2 < _LEAST_OF_CLICK else None


def _is_writable(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


def _lead_nowhere(fd: int) -> None:
    """For good: what is still buffered, what comes later, and what Python flushes when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == fd:
        os.set_inheritable(fd, True)
    else:
        os.dup2(nowhere, fd)
        os.close(nowhere)
