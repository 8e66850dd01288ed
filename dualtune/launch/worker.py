"""The command of each process of a run, and the exit code of the run from those of its processes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualtune.errors import (
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
from dualtune.train.state.run_dir import CHECKPOINTS, check_usable

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
    the others. `asked`:
    they were asked to save and stop; one that this signal killed had nothing to save.
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
