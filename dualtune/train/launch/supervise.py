"""Start the processes of a run, forward stop signals, restart all if some died, and return their exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

import psutil

from dualtune.base import interrupt
from dualtune.base.errors import (
    ConfigError,
    DataError,
    DeviceFault,
    DiskError,
    EnvironmentFault,
    FormatError,
    LockedError,
    NonFiniteError,
    OutOfMemory,
    Preempted,
)
from dualtune.base.world import launched_number
from dualtune.train.state.run_dir import (
    CHECKPOINTS,
    RestartNote,
    check_usable,
    interrupted,
    read_restart,
    write_restart,
)

# ----------------------------------------------------------------------------------------------------------------------
# The command of each process of a run, and the exit code of the run from those of its processes.

# Exit codes with a reason in the worker itself: a restart would end the same.
_OWN = (ConfigError, DataError, DiskError, FormatError, NonFiniteError, OutOfMemory, LockedError)
OWN_REASONS = tuple(error.exit_code for error in _OWN)
# Exit codes that a restart may avoid: of a bug that is rarely hit, of a device that works again in a new process, and
# of waiting for a process that was gone.
WORTH_A_RESTART = (1, DeviceFault.exit_code, EnvironmentFault.exit_code)
_ENDED_BY_US = (-signal.SIGTERM, -signal.SIGUSR1)  # before the worker had its signal handlers


@dataclass(frozen=True, slots=True)
class Work:
    """One run, and the command line of each of its processes."""

    config: Path
    run_dir: Path
    platform: str
    overrides: tuple[str, ...]
    resume: str  # auto, never or a path

    def command(self, resume: str | None = None) -> list[str]:
        words = [
            sys.executable,
            "-P",
            "-m",
            "dualtune.cli.main",
            "train",
            str(self.config),
            "--platform",
            self.platform,
        ]
        for override in self.overrides:
            words += ["--set", override]
        return [*words, "--resume", resume or self.resume]

    def first_resume(self) -> str:
        """Return the --resume of the first attempt. `never` is checked here, so that a restart may resume.

        ConfigError for `never` if there is a run already.
        """
        if self.resume != "never":
            return self.resume
        check_usable(self.run_dir, "never")
        return "auto"

    def next_resume(self) -> str:
        """Return the --resume of a restart: a given path only while the run has no checkpoint yet."""
        has_own = any((self.run_dir / CHECKPOINTS).glob("step-*"))
        return self.resume if self.resume not in ("auto", "never") and not has_own else "auto"


def verdict(codes: Mapping[int, int], *, asked: bool) -> int:
    """Return the exit code of a run from those of its processes by rank (negative: killed by that signal).

    A reason in a worker itself comes first, then a signal that killed one, a device that failed, and what followed in
    the others. `asked`: they were asked to save and stop; one that this signal killed had nothing to save.
    """
    failed = [code for _, code in sorted(codes.items()) if code != 0]
    if not failed:
        return 0
    own = [code for code in failed if code in OWN_REASONS]
    killed = [code for code in failed if code < 0 and code not in _ENDED_BY_US]
    stopped = [code for code in failed if code == Preempted.exit_code or (asked and code in _ENDED_BY_US)]
    device = [code for code in failed if code == DeviceFault.exit_code]
    others = [code for code in failed if code > 0]
    code = (own or killed or device or (stopped and [Preempted.exit_code]) or others or failed)[0]
    return code if code > 0 else 128 - code


def may_restart(code: int, num_processes: int) -> bool:
    """Return whether another attempt may succeed. A single process waits for no other, so its code 4 would repeat."""
    return code > 130 or (code in WORTH_A_RESTART and not (code == EnvironmentFault.exit_code and num_processes == 1))


# ----------------------------------------------------------------------------------------------------------------------
# Start, watch, and restart the processes of a run on one or several machines.

POLL_S = 0.2
FAMILY_S = 2.0
Tell = Callable[[str], None]


class Attempt(Protocol):
    """The processes of one attempt, started by an external program."""

    process: subprocess.Popen[bytes]  # the external program

    def ask_to_stop(self) -> None:
        """Signal the workers to save and stop."""
        ...

    def poll(self) -> None:
        """Called several times a second while they run."""
        ...

    def codes(self) -> Mapping[int, int]:
        """Return the exit codes of its workers by rank, as far as known, after it has ended."""
        ...


class Launcher(Protocol):
    """A way to start the processes of a run."""

    @property
    def num_processes(self) -> int: ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for the processes, added to ours."""
        ...

    def command(self, worker: Sequence[str]) -> list[str]: ...

    def start(self, worker: Sequence[str]) -> Attempt: ...


def supervise(launcher: Launcher, work: Work, *, max_restarts: int, tell: Tell) -> int:
    """Run to the end, with at most `max_restarts` restarts. Return the exit code: 0, 75, or that of the workers."""
    resume, restarts = work.first_resume(), 0
    with interrupt.handled():
        while True:
            try:
                code, asked = _attempt(launcher.start(work.command(resume)), launcher.num_processes)
            except KeyboardInterrupt:
                raise interrupted(work.run_dir) from None
            if asked or restarts == max_restarts or not may_restart(code, launcher.num_processes):
                break
            resume, restarts = work.next_resume(), restarts + 1
            tell(f"restart     {restarts} of {max_restarts}: {_reason(code)}; all processes are restarted")
    if code == Preempted.exit_code:
        tell("stopped     run the same command again to continue")
    elif code:
        tell(f"failed      {_reason(code)}{f' in attempt {restarts + 1}' if restarts else ''}")
    return code


def _attempt(attempt: Attempt, num_processes: int) -> tuple[int, bool]:
    """Return the exit code, and whether the processes were asked to stop."""
    stopping, family, listed_s = False, list[psutil.Process](), 0.0
    try:
        while attempt.process.poll() is None:
            if interrupt.requested() and not stopping:
                stopping = True
                attempt.ask_to_stop()
            attempt.poll()
            if time.monotonic() - listed_s > FAMILY_S:  # listed now, to find the workers after their parent is gone
                family, listed_s = _family(attempt.process.pid) or family, time.monotonic()
            time.sleep(POLL_S)
    finally:  # after a second Ctrl-C, a killed launcher or a bug of ours too, no process stays behind
        kill([*family, *_family(attempt.process.pid)])
        attempt.process.wait()
    codes = dict(attempt.codes())
    if not any(codes.values()):
        if attempt.process.returncode != 0:
            codes[-1] = attempt.process.returncode  # of the external program
        elif len(codes) < num_processes:
            codes[-1] = 1  # it reports success, but not the end of every worker
    return verdict(codes, asked=stopping), stopping


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants that still run."""
    try:
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []


def _reason(code: int) -> str:
    return f"killed by signal {code - 128}" if code > 130 else f"exit code {code}"


# ----------------------------------------------------------------------------------------------------------------------
# Supervise a run of one process: restart it from its last checkpoint, with less memory if a signal has killed it.
#
# This is the recovery where memory that runs out raises no error: MLX then ends with SIGSEGV on Linux, a Metal command
# may abort the process on a Mac, and the system's own guards against a shortage kill with SIGKILL. Of the runs that end
# with an exit code, only one whose device failed is restarted: a new process may be able to use it again.
#
# The parent does nothing but wait. The process that trains is in a session of its own, so that a Ctrl-C reaches it
# once, like every other signal: forwarded by the parent. Its output goes where the parent's goes.

# How a process ends that lacks memory: an allocation that failed unnoticed, a mapped page that could not be read, an
# uncaught error of a library, and the killers of Linux and macOS.
DEATHS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGKILL)
FORWARDED = (*interrupt.ALL, signal.SIGQUIT)
SHOW_CURSOR = b"\x1b[?25h"


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
