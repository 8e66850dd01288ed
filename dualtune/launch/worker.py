"""What every process of a run executes, and what the codes with which they ended mean together."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualtune.errors import (
    ConfigError,
    DataError,
    DiskError,
    EnvironmentFault,
    FormatError,
    LockedError,
    NonFiniteError,
    Preempted,
)
from dualtune.train.state.run_dir import CHECKPOINTS, check_usable

# What a worker says of itself: begun again, it would say the same. Out of memory (8) has no class of its own yet.
OWN_REASONS = (*(e.exit_code for e in (ConfigError, DataError, DiskError, FormatError, NonFiniteError, LockedError)), 8)
# Of these, the next attempt may be free: a bug that needs bad luck, and a process that others waited for in vain.
WORTH_A_RESTART = (1, EnvironmentFault.exit_code)
_ENDED_BY_US = (-signal.SIGTERM, -signal.SIGUSR1)  # before the worker could listen to signals


@dataclass(frozen=True, slots=True)
class Work:
    """One run, as the command line of each of its processes."""

    config: Path
    run_dir: Path
    platform: str
    overrides: tuple[str, ...]
    resume: str  # auto, never or a path

    def command(self, resume: str | None = None) -> list[str]:
        words = [sys.executable, "-m", "dualtune.cli.main", "train", str(self.config), "--platform", self.platform]
        for override in self.overrides:
            words += ["--set", override]
        return [*words, "--resume", resume or self.resume]

    def first_resume(self) -> str:
        """`never` is decided here, once, so that a restart may go on. ConfigError if there is a run already."""
        if self.resume != "never":
            return self.resume
        check_usable(self.run_dir, "never")
        return "auto"

    def next_resume(self) -> str:
        """From where a restart goes on: from elsewhere only as long as there is no checkpoint of its own."""
        has_own = any((self.run_dir / CHECKPOINTS).glob("step-*"))
        return self.resume if self.resume not in ("auto", "never") and not has_own else "auto"


def verdict(codes: Mapping[int, int], *, asked: bool) -> int:
    """The exit code of a run from those of its processes by rank (negative: killed by that signal).

    What a worker says of itself comes first, then how one died, then what followed from it in the others. `asked`: they
    were told to save and stop, and one that died of that had nothing to save.
    """
    failed = [code for _, code in sorted(codes.items()) if code != 0]
    if not failed:
        return 0
    own = [code for code in failed if code in OWN_REASONS]
    killed = [code for code in failed if code < 0 and code not in _ENDED_BY_US]
    stopped = [code for code in failed if code == Preempted.exit_code or (asked and code in _ENDED_BY_US)]
    others = [code for code in failed if code > 0]
    code = (own or killed or (stopped and [Preempted.exit_code]) or others or failed)[0]
    return code if code > 0 else 128 - code


def may_restart(code: int, num_processes: int) -> bool:
    """Whether another attempt may end otherwise. One process alone waits for nobody: its code 4 is its own reason."""
    return code > 130 or (code in WORTH_A_RESTART and not (code == EnvironmentFault.exit_code and num_processes == 1))
