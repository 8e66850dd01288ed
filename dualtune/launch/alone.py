"""Supervise a run of one process: restart it from its last checkpoint, with less memory if a signal has killed it.

This is the recovery where memory that runs out raises no error: MLX then ends with SIGSEGV on Linux, a Metal command
may abort the process on a Mac, and the system's own guards against a shortage kill with SIGKILL. Of the runs that end
with an exit code, only one whose device failed is restarted: a new process may be able to use it again.

The parent does nothing but wait. The process that trains is in a session of its own, so that a Ctrl-C reaches it once,
like every other signal: forwarded by the parent. Its output goes where the parent's goes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from dualtune import interrupt
from dualtune.errors import ConfigError, DeviceFault
from dualtune.launch.worker import Work, verdict
from dualtune.train.state.restart import RestartNote, read_restart, write_restart
from dualtune.world import launched_number

# How a process ends that lacks memory: an allocation that failed unnoticed, a mapped page that could not be read, an
# uncaught error of a library, and the killers of Linux and macOS.
DEATHS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGKILL)
FORWARDED = (*interrupt.ALL, signal.SIGQUIT)
SHOW_CURSOR = b"\x1b[?25h"

Tell = Callable[[str], None]


def supervise_alone(work: Work, *, max_restarts: int, tell: Tell) -> int:
    """Run to the end, with at most `max_restarts` restarts, and return the exit code of the last process.

    128 + n if signal n killed it. ConfigError if this is one of several processes, or for `--resume never` if there is
    a run already.
    """
    _check_alone(max_restarts)
    resume, restarts, options = work.first_resume(), 0, list[str]()
    child = _Child()
    with tempfile.TemporaryDirectory(prefix="dualtune-") as place, child.forwarding():
        path = Path(place) / "restart.json"
        while (end := child.run([*work.command(resume), *options])) and restarts < max_restarts:
            restarts, resume = restarts + 1, work.next_resume()
            if child.code < 0:
                note = read_restart(path)
                write_restart(path, replace(note, killed_by=child.death) if note else RestartNote(child.death))
                options = ["--restart-note", str(path)]
            tell(f"restart     {restarts} of {max_restarts}: {end}")
    if end:
        tell(f"failed      {end}, after {restarts} restarts; the same command resumes the run")
    return verdict({0: child.code}, asked=child.is_asked)


class _Child:
    """The process that trains."""

    def __init__(self) -> None:
        self.code = 0  # of the last one; negative: killed by that signal
        self.is_asked = False  # whether a signal has come for it
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []  # signals that have come before there was a process

    @property
    def death(self) -> str:
        """The name of the signal that killed it."""
        return signal.Signals(-self.code).name

    def run(self, command: Sequence[str]) -> str:
        """Run a process to its end. Return how it ended if another attempt may do better, else nothing."""
        self._process = subprocess.Popen(command, start_new_session=True)
        self._forward()
        self.code = self._process.wait()
        if self.is_asked:
            return ""
        if self.code == DeviceFault.exit_code:
            return "the device failed"
        if -self.code not in DEATHS:
            return ""
        if os.isatty(2):  # the progress line had hidden it
            os.write(2, SHOW_CURSOR)
        return f"killed by {self.death}, as when memory runs out"

    @contextlib.contextmanager
    def forwarding(self) -> Generator[None]:
        """Forward signals to the process inside the block. SIGHUP stays ignored under nohup."""
        handlers = dict.fromkeys(FORWARDED, self._on_signal) | {signal.SIGTSTP: self._pause}
        before = {s: signal.signal(s, handlers[s]) for s in handlers if signal.getsignal(s) != signal.SIG_IGN}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        self._waiting.append(number)
        self._forward()

    def _forward(self) -> None:
        while self._process is not None and self._waiting:
            self._process.send_signal(self._waiting.pop(0))

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Stop with the process, as for a Ctrl-Z without a parent, and continue with it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


def _check_alone(max_restarts: int) -> None:
    """Raise ConfigError in a process that torchrun, mlx.launch or another launcher has started with others."""
    if launched_number("WORLD_SIZE", 1) > 1 or os.environ.get("MLX_HOSTFILE"):
        raise ConfigError(
            f"--max-restarts: got {max_restarts} in one of several processes, which would wait for it in vain. "
            "Restart all of them: dualtune launch --max-restarts N, or torchrun --max-restarts N"
        )
