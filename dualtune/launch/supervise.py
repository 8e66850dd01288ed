"""Start the processes of a run, forward stop signals, restart all if some died, and return their exit code."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import psutil

from dualtune import interrupt
from dualtune.errors import Preempted
from dualtune.launch.worker import Work, may_restart, verdict

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
            code, asked = _attempt(launcher.start(work.command(resume)), launcher.num_processes)
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
    asked, family, listed_s = False, list[psutil.Process](), 0.0
    try:
        while attempt.process.poll() is None:
            if interrupt.requested() and not asked:
                asked = True
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
    return verdict(codes, asked=asked), asked


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
