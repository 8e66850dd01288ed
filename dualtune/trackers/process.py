"""The hook that starts a process for each tracker of a run, and ends it with the run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dualtune.errors import EnvironmentFault
from dualtune.hooks import Hook, RunInfo
from dualtune.io.folder import open_own

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
WAIT_S = 30  # at the end of the run, for the last rows of all trackers


class TrackerProcesses(Hook):
    """Starts `dualtune.trackers.send` for each name. A process that fails or hangs is no concern of the run.

    The process sees the end of the run, however it comes, because its standard input ends.
    """

    def __init__(self, run: Path, names: Sequence[str]) -> None:
        self._run, self._names = run, names
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def on_start(self, info: RunInfo) -> None:
        for name in self._names:
            if name in self._processes:  # an event that has failed is told again
                continue
            # -P: no module of the current directory, which may hold anybody's files, is imported
            command = [sys.executable, "-P", "-m", "dualtune.trackers.send", str(self._run), name]
            command += ["--new"] if info.first_step == 0 else []
            with os.fdopen(open_own(self._run / f"track-{name}.log", _FLAGS), "ab") as log:
                self._processes[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )

    def on_end(self) -> None:
        """Wait a moment for the last rows. EnvironmentFault, which is shown as an event, says what is left."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        failed, slow, ends = list[str](), list[str](), time.monotonic() + WAIT_S
        for name, process in self._processes.items():
            try:
                if process.wait(max(0.0, ends - time.monotonic())) != 0:
                    failed.append(name)
            except subprocess.TimeoutExpired:
                slow.append(name)
        self._processes.clear()
        problems = [f"{name} is still sending, in a process of its own" for name in slow]
        problems += [
            f"{name}: not all was sent, see {self._run / f'track-{name}.log'}. "
            f"To send the rest: dualtune track {self._run} --to {name}"
            for name in failed
        ]
        if problems:
            raise EnvironmentFault("; ".join(problems))
