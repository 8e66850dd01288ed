"""How slow a transfer may be before it counts as stopped: in bytes per time window, without a limit in total."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dualtune.transfer.remotes.patience import Cut

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
