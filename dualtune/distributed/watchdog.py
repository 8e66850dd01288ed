"""A timeout for waiting on other processes: a hung collective blocks in a library, where no exception reaches it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator

from dualtune.errors import EnvironmentFault
from dualtune.text.escape import visible
from dualtune.world import WAIT_VARIABLE, wait_limit_s


def end_process(message: str) -> None:
    """Print the message, and end the process at once with exit code 4."""
    sys.stderr.write(f"Error: {visible(message)}\n")
    sys.stderr.flush()
    os._exit(EnvironmentFault.exit_code)


class Watchdog:
    """A thread that checks the time. It calls `expire(message)` when a wait has lasted `limit_s`."""

    def __init__(self, limit_s: float | None = None, expire: Callable[[str], None] = end_process) -> None:
        self.limit_s = wait_limit_s() if limit_s is None else limit_s
        self._expire = expire
        self._wait: tuple[str, float] | None = None  # what it waits for, and since when
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Time the block, which may wait for another process."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dualtune-watchdog", daemon=True)
            self._thread.start()
        self._wait = what, time.monotonic()
        try:
            yield
        finally:
            self._wait = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.limit_s / 4))
            wait = self._wait
            if wait is not None and time.monotonic() - wait[1] > self.limit_s:
                self._expire(
                    f"waited {self.limit_s:g} s for {wait[0]}: it hangs or needs more time. Check its output. "
                    f"To wait longer: {WAIT_VARIABLE}=<seconds>"
                )
                return
