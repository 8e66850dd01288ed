"""Signals that ask a run to stop. The handler only sets a flag; long work polls it at places where it is safe to stop.

SIGTERM (schedulers), SIGUSR1 and SIGUSR2 (Slurm's warning before the time is up), SIGINT (Ctrl-C), and SIGHUP (a
terminal that was closed) where nobody chose otherwise, as nohup does. A Ctrl-C after any of them stops at once. The
flag is a global because signals belong to the process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

from dualtune.errors import Preempted

TERMINATION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ALL = (*TERMINATION, signal.SIGINT, signal.SIGHUP)

_received: signal.Signals | None = None
_handling = False


@contextlib.contextmanager
def handled(signals: tuple[signal.Signals, ...] = ALL) -> Generator[None]:
    """Let the signals set the flag. Inside another such block, or in another thread than the main one, do nothing."""
    global _received, _handling
    if _handling or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [s for s in signals if s != signal.SIGHUP or signal.getsignal(s) == signal.SIG_DFL]
    before = {s: signal.signal(s, _handle) for s in ours}
    _handling = True
    try:
        yield
    finally:
        for s, handler in before.items():
            # The same wish may come twice: Slurm tells a job and each of its steps. Who has saved shall not die of it.
            is_late = _received is not None and s in TERMINATION and handler == signal.SIG_DFL
            signal.signal(s, signal.SIG_IGN if is_late else handler)
        _received, _handling = None, False


def requested() -> bool:
    """Whether a signal has asked to stop."""
    return _received is not None


def poll() -> None:
    """Raise Preempted if a signal has asked to stop."""
    if _received is not None:
        raise Preempted(f"Stopped by {_received.name}")


def _handle(number: int, frame: FrameType | None) -> None:
    global _received
    if number == signal.SIGINT and _received is not None:
        raise KeyboardInterrupt
    _received = signal.Signals(number)
