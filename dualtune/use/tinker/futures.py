"""What clients wait for: the results of requests, kept until they are retrieved or expire.

A request has one id, made of its place, so that one that is sent twice has one result. Any thread may call these.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

KEPT_S = 120.0  # after a result was sent: the connection may have broken, and the client asks again
UNCLAIMED_S = 3600.0
MAX_BYTES = 1 << 30  # of results that are kept; beyond it, those that have been sent go first


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that has failed, by its client's fault or not."""

    message: str
    category: Literal["user", "server"]


@dataclass(frozen=True, slots=True)
class Reply:
    """A result: JSON, or a protobuf for clients that want one."""

    table: Callable[[], Mapping[str, Any]]
    protobuf: Callable[[], bytes] | None = None
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Future:
    """A request that is executed later; the client fetches its outcome."""

    id: str
    sampler: tuple[str, int] | None = None  # the sampling session and clone that learns of its end
    ended: threading.Event = field(default_factory=threading.Event)
    outcome: Reply | Failure | None = None
    is_cancelled: bool = False
    expires: float = float("inf")
    is_sent: bool = False


@dataclass(slots=True)
class _Ends:
    """The ends of requests of one sampler, numbered."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    ends: deque[tuple[int, Future]] = field(default_factory=lambda: deque[tuple[int, Future]]())
    count: int = 0


class Futures:
    """The futures of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future] = {}
        self._ends: dict[tuple[str, int], _Ends] = {}
        self._bytes = 0

    def get_or_add(self, id: str, sampler: tuple[str, int] | None = None) -> tuple[Future, bool]:
        """Return the future of a request, and whether it is new."""
        with self._lock:
            future = self._futures.get(id)
            if future is not None:
                return future, False
            future = self._futures[id] = Future(id, sampler)
            return future, True

    def get(self, id: str) -> Future | None:
        """Return a future that is known."""
        with self._lock:
            return self._futures.get(id)

    def end(self, future: Future, outcome: Reply | Failure) -> None:
        """Give a future its outcome, once, and wake who waits for it."""
        with self._lock:
            if future.outcome is not None:
                return
            future.outcome, future.expires = outcome, monotonic() + UNCLAIMED_S
            self._bytes += _num_bytes(future)
            ends = None if future.sampler is None else self._ends.setdefault(future.sampler, _Ends())
        future.ended.set()
        if ends is not None:
            with ends.changed:
                ends.count += 1
                ends.ends.append((ends.count, future))
                ends.changed.notify_all()

    def forget(self, future: Future) -> None:
        """Forget a request that was not accepted."""
        with self._lock:
            self._futures.pop(future.id, None)

    def mark_sent(self, future: Future) -> None:
        """Note that the client is being sent the outcome: it is kept a while longer, for a broken connection."""
        future.is_sent, future.expires = True, monotonic() + KEPT_S

    def ends_after(self, sampler: tuple[str, int], cursor: int, timeout: float) -> tuple[list[Future], int]:
        """Wait for ends of a sampler's requests after those that the client has seen, up to `cursor`."""
        with self._lock:
            ends = self._ends.setdefault(sampler, _Ends())
        with ends.changed:
            while ends.ends and ends.ends[0][0] <= cursor:
                ends.ends.popleft()
            ends.changed.wait_for(lambda: bool(ends.ends), timeout)
            return [future for _, future in ends.ends], ends.ends[-1][0] if ends.ends else cursor

    def drop(self, ids: Iterable[str]) -> None:
        """Forget results that the client says it has."""
        with self._lock:
            for id in ids:
                future = self._futures.get(id)
                if future is not None and future.ended.is_set():
                    self._remove(future)

    def drop_samplers(self, session: str) -> None:
        """Forget who waited for the samplers of a session that has ended."""
        with self._lock:
            for key in [key for key in self._ends if key[0].split(":")[0] == session]:
                del self._ends[key]

    def expire(self) -> None:
        """Forget what has not been asked for in time, and the oldest of what has been sent if all is too much."""
        now = monotonic()
        with self._lock:
            for future in [future for future in self._futures.values() if future.expires < now]:
                self._remove(future)
            if self._bytes > MAX_BYTES:
                for future in sorted(filter(lambda f: f.is_sent, self._futures.values()), key=lambda f: f.expires):
                    if self._bytes <= MAX_BYTES:
                        break
                    self._remove(future)

    def _remove(self, future: Future) -> None:
        self._bytes -= _num_bytes(future)
        del self._futures[future.id]


def _num_bytes(future: Future) -> int:
    return future.outcome.num_bytes if isinstance(future.outcome, Reply) else 0
