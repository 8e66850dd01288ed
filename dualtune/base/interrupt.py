"""Signals that ask a run to stop: the handler sets a flag, and long work polls it where it is safe to stop.

Native code (a tokenizer, a Parquet reader) does not poll and lets no handler run. If nothing can be lost, a thread ends
the process when a signal gets no answer within a few seconds.

Handled are SIGTERM (schedulers), SIGUSR1 and SIGUSR2 (Slurm's warning before the time limit), SIGINT (Ctrl-C), and
SIGHUP (a closed terminal) unless it has another disposition, as under nohup. A Ctrl-C after any of them stops at once.
The flag is a global because signals belong to the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

from dualtune.base.errors import Preempted

TERMINATION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ALL = (*TERMINATION, signal.SIGINT, signal.SIGHUP)

GRACE_S = 5.0

Abandon = Callable[[], bool]


class Abandoned(Preempted):
    """A signal stopped work that leaves nothing behind."""

    again = "Nothing is kept of it: the same command starts it again."


_received: signal.Signals | None = None
_handling = False
_error = Preempted  # what a stop raises


class _Polling(threading.local):
    check: Callable[[], object] | None = None  # what `poll` does in this thread


_polling = _Polling()


@contextlib.contextmanager
def handled(
    signals: tuple[signal.Signals, ...] = ALL, abandon: Abandon | None = None, *, error: type[Preempted] = Preempted
) -> Generator[None]:
    """Let the signals set the flag. Do nothing inside another such block or outside the main thread.

    `error`: what a stop raises, Abandoned where the same command would not continue.

    If a signal gets no answer, `abandon` is called in another thread: it cleans up and returns True if the process may
    be ended, or False if there is still something to save.
    """
    global _received, _handling, _error
    if _handling or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [s for s in signals if s != signal.SIGHUP or signal.getsignal(s) in (signal.SIG_DFL, _end_early)]
    before = {s: signal.signal(s, _handle) for s in caught}
    _handling, _error = True, error
    try:
        with _ended_if_unanswered(frozenset(caught), abandon) if abandon else contextlib.nullcontext():
            yield
    finally:
        for s, handler in before.items():
            # The signal may come twice: Slurm sends it to a job and to each step. The second must not kill a saved run.
            is_late = _received is not None and s in TERMINATION and handler in (signal.SIG_DFL, _end_early)
            signal.signal(s, signal.SIG_IGN if is_late else handler)
        _received, _handling, _error = None, False, Preempted


@contextlib.contextmanager
def early() -> Generator[None]:
    """Let a signal end the process with the exit code of a stop until `handled` takes over: imports take seconds.

    There is nothing to save yet. Ctrl-C stays KeyboardInterrupt.
    """
    if _handling or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [s for s in (*TERMINATION, signal.SIGHUP) if signal.getsignal(s) == signal.SIG_DFL]
    for s in caught:
        signal.signal(s, _end_early)
    try:
        yield
    finally:
        for s in caught:
            if signal.getsignal(s) == _end_early:
                signal.signal(s, signal.SIG_DFL)


def _end_early(number: int, frame: FrameType | None) -> None:
    _end(signal.Signals(number))


def always() -> bool:
    """A value for `abandon`: there is never anything to save."""
    return True


@contextlib.contextmanager
def _ended_if_unanswered(signals: frozenset[signal.Signals], abandon: Abandon) -> Generator[None]:
    """End the process if a signal gets no answer.

    The interpreter writes the number of each signal into a pipe at once, whatever the main thread is doing.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    done = threading.Event()

    def watch() -> None:
        while (numbers := os.read(reading, 1)) and not done.is_set():
            name = signal.Signals(numbers[0])
            if name in signals and not done.wait(GRACE_S) and abandon():
                _end(name)

    thread = threading.Thread(target=watch, name="dualtune-signals", daemon=True)
    thread.start()
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(previous)
        os.close(writing)  # ends the thread
        thread.join()
        os.close(reading)


def _end(name: signal.Signals) -> None:
    """End the process at once, without Python's streams: the main thread may hold their locks."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""
    text = f"{show_cursor}\nStopped by {name.name}. {_error.again}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(Preempted.exit_code)


def requested() -> bool:
    """Return whether a signal has asked to stop."""
    return _received is not None


@contextlib.contextmanager
def polled_by(check: Callable[[], object]) -> Generator[None]:
    """Let `poll` call this in the block, in this thread: processes that stop together must ask each other first."""
    _polling.check = check
    try:
        yield
    finally:
        _polling.check = None


def poll() -> None:
    """Raise Preempted if a signal has asked to stop."""
    if _polling.check is not None:
        _polling.check()
    elif (stop := stopped()) is not None:
        raise stop


def stopped() -> Preempted | None:
    """Return the error of a signal that has asked to stop."""
    return None if _received is None else _error(f"Stopped by {_received.name}")


def _handle(number: int, frame: FrameType | None) -> None:
    global _received
    if number == signal.SIGINT and _received is not None:
        raise KeyboardInterrupt
    _received = signal.Signals(number)
