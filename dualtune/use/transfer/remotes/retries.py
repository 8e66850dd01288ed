"""Lost connections: when a transfer counts as stopped, how often it is tried again, and with what pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dualtune.base import interrupt
from dualtune.base.errors import EnvironmentFault
from dualtune.base.text import in_bytes

MAX_PAUSE_S = 30.0
T = TypeVar("T")


class Cut(Exception):
    """The connection was lost or the other end failed; another attempt may succeed."""


class AbsentFault(EnvironmentFault):
    """The requested file does not exist."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: no such file. Copy one there with `dualtune push`")


@dataclass(slots=True)
class Patience:
    """How often a transfer retries, and where it reports progress."""

    retries: int = 5  # in a row, without a chunk of progress in between
    say: Callable[[str], None] = lambda line: None
    show: Callable[[int, int], None] = lambda done_bytes, total_bytes: None  # (bytes that arrived, bytes in total)
    first_pause_s: float = 1.0
    _best: int = field(default=0, init=False)
    _total: int = field(default=0, init=False)

    def reached(self, done_bytes: int, total_bytes: int) -> None:
        """Note how many bytes arrived and are verified: only these are progress, not those that were sent."""
        self.show(done_bytes, total_bytes)
        self._best, self._total = max(self._best, done_bytes), total_bytes

    def keep_trying(self, attempt: Callable[[], T], where: str) -> T:
        """Return the result of the first attempt that is not cut. EnvironmentFault after too many cuts in a row.

        It ends: only an attempt that transfers a chunk resets the count, and a file has finitely many.
        """
        failures, best = 0, self._best
        while True:
            interrupt.poll()
            try:
                return attempt()
            except Cut as cut:
                interrupt.poll()  # a Ctrl-C reaches ssh too and looks like a cut
                failures = 1 if self._best > best else failures + 1
                best = max(best, self._best)
                if failures > self.retries:
                    raise EnvironmentFault(self._given_up(where, failures, cut)) from cut
                pause_s = min(self.first_pause_s * 2 ** (failures - 1), MAX_PAUSE_S)
                self.say(f"retry       {cut}; attempt {failures} of {self.retries} in {pause_s:.0f} s")
                _sleep(pause_s)

    def _given_up(self, where: str, failures: int, cut: Cut) -> str:
        done = f"{in_bytes(self._best)} of {in_bytes(self._total)} are" if self._total else "Nothing is"
        return (
            f"{where}: gave up after {failures} attempts in a row without progress; the last error: {cut}. "
            f"{done} transferred. Run the same command again to resume, or allow more attempts with --retries"
        )


def _sleep(pause_s: float) -> None:
    end = time.monotonic() + pause_s
    while (seconds := end - time.monotonic()) > 0:
        interrupt.poll()
        time.sleep(min(seconds, 0.2))


# ----------------------------------------------------------------------------------------------------------------------
# How slow a transfer may be before it counts as stopped: in bytes per time window, without a limit in total.

# Longer than sshd waits for a password (LoginGraceTime, 120 s): nothing moves while the user types it.
WINDOW_S = 180.0
SLOWEST_HASH = 4 << 20  # bytes per second: the other end sends nothing while it hashes a file
LEAST_BYTES = 1 << 10  # of an answer, which has a line per chunk
LEAST_DATA_BYTES = 64 << 10  # of file content

Clock = Callable[[], float]


@dataclass(slots=True)
class Pace:
    """Counts the bytes that move. `check` raises Cut after a window with fewer than `least` bytes."""

    least: int = LEAST_BYTES
    window_s: float = WINDOW_S
    clock: Clock = time.monotonic
    _moved: int = field(default=0, init=False)
    _began: float | None = field(default=None, init=False)

    def moved(self, num_bytes: int) -> None:
        self._moved += num_bytes

    def check(self) -> None:
        now = self.clock()
        if self._began is None or self._moved >= self.least:
            self._began, self._moved = now, 0
        elif now - self._began > self.window_s:
            raise Cut(f"got {self._moved} bytes in {self.window_s:.0f} s, fewer than {self.least}")


def window_for(hashed_bytes: int) -> float:
    """Return the window for an answer that the other end gives after hashing so many bytes."""
    return WINDOW_S + hashed_bytes / SLOWEST_HASH
