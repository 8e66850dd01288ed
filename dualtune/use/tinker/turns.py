"""Whose turn it is: requests to a run are executed in the order of their numbers, in which they may not come.

The connections' threads submit, one thread executes. Requests for samples have no order among them: all that wait are
one batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic

from dualtune.base.http_server import BadRequest
from dualtune.use.tinker.futures import Failure, Future, Futures, Reply
from dualtune.use.tinker.host import TrainingHost
from dualtune.use.tinker.messages import SampleRequest

MAX_BYTES = 1 << 30  # of the bodies that wait
MAX_SEQUENCES = 256  # of a batch of samples
GAP_S = 300.0  # for as long, the client tries to send a request that does not come through


@dataclass(slots=True, eq=False)
class RunJob:
    """A request that changes or asks a run."""

    future: Future
    run: str
    work: Callable[[TrainingHost], Reply]
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class SampleJob:
    """A request for samples."""

    future: Future
    source: Callable[[], str | None]  # asked when it is drawn: what a run publishes changes
    request: SampleRequest
    last: int | None = None  # how many tokens of the prompt are scored; None: all
    num_bytes: int = 0


@dataclass(slots=True)
class _Order:
    """The requests of one run that have come before their turn."""

    next: int = 1
    early: dict[int, RunJob] = field(default_factory=lambda: dict[int, RunJob]())
    since: float = 0.0  # when the first of these came


class Turns:
    """The queue. At most `max_waiting` requests wait in it."""

    def __init__(self, futures: Futures, max_waiting: int) -> None:
        self._futures, self._max_waiting = futures, max_waiting
        self._changed = threading.Condition()
        self._ready: deque[RunJob | SampleJob] = deque()
        self._orders: dict[str, _Order] = {}
        self._bytes = 0
        self.is_closed = False

    def open(self, run: str) -> None:
        """Expect requests to a run, the first one has the number 1."""
        with self._changed:
            self._orders.setdefault(run, _Order())

    def runs(self) -> list[str]:
        """Return the runs whose requests are expected."""
        with self._changed:
            return [*self._orders]

    def submit(self, run: str, seq: int | None, work: Callable[[TrainingHost], Reply], num_bytes: int = 0) -> Future:
        """Put a request to a run into its place. One that has been sent before has the same future."""
        with self._changed:
            order = self._orders.get(run)
            if order is None:
                raise BadRequest(
                    404, f"model_id: {run} is not loaded here. Load a checkpoint of it, which gives a new run"
                )
            if seq is None:
                seq = max(order.next, *(number + 1 for number in order.early), 1)
            future, is_new = self._futures.get_or_add(f"{run}:{seq}")
            if not is_new:
                return future
            turn = RunJob(future, run, work, num_bytes)
            if seq < order.next:
                self._futures.end(future, Failure(f"request {seq} has been executed, its result is gone", "server"))
            elif seq > order.next:
                self._check_room(future, num_bytes)
                if not order.early:
                    order.since = monotonic()
                order.early[seq] = turn
                self._bytes += num_bytes
            else:  # always accepted: others may wait for it
                self._put(turn)
                order.next += 1
                while (following := order.early.pop(order.next, None)) is not None:
                    self._bytes -= following.num_bytes
                    self._put(following)
                    order.next += 1
                order.since = monotonic()
            return future

    def submit_first(self, turn: RunJob) -> None:
        """Put a request that makes a run into the queue."""
        with self._changed:
            self._check_room(turn.future, turn.num_bytes)
            self._put(turn)

    def submit_always(self, turn: RunJob) -> None:
        """Put what the server itself has to do into the queue."""
        with self._changed:
            self._put(turn)

    def submit_sample(self, job: SampleJob) -> None:
        """Put a request for samples into the queue."""
        with self._changed:
            self._check_room(job.future, job.num_bytes)
            self._put(job)

    def _put(self, item: RunJob | SampleJob) -> None:
        if self.is_closed:
            self._futures.end(item.future, Failure("the server is stopping", "server"))
            return
        self._bytes += item.num_bytes
        self._ready.append(item)
        self._changed.notify()

    def _check_room(self, future: Future, num_bytes: int) -> None:
        waiting = len(self._ready) + sum(len(order.early) for order in self._orders.values())
        if waiting >= self._max_waiting or self._bytes + num_bytes > MAX_BYTES:
            self._futures.forget(future)
            raise BadRequest(429, f"{waiting} requests of {self._bytes} bytes are waiting; try again later")

    def next(self, timeout: float) -> RunJob | list[SampleJob] | None:
        """Return what is to be done next, or None if there is nothing for a while. For the executing thread."""
        with self._changed:
            while self._ready or self._changed.wait_for(lambda: bool(self._ready), timeout):
                item = self._ready.popleft()
                self._bytes -= item.num_bytes
                if item.future.is_cancelled:
                    self._futures.end(item.future, Failure("the request was cancelled", "user"))
                elif isinstance(item, RunJob):
                    return item
                else:
                    return [item, *self._samples(MAX_SEQUENCES - item.request.num_samples)]
        return None

    def _samples(self, room: int) -> Iterator[SampleJob]:
        others: list[RunJob | SampleJob] = []
        for item in self._ready:
            if not isinstance(item, SampleJob) or item.future.is_cancelled or item.request.num_samples > room:
                others.append(item)
                continue
            room -= item.request.num_samples
            self._bytes -= item.num_bytes
            yield item
        self._ready = deque(others)

    def close_run(self, run: str, reason: str) -> None:
        """Expect no more requests to a run; those that wait have failed."""
        with self._changed:
            order = self._orders.pop(run, None)
            waiting = [item for item in self._ready if isinstance(item, RunJob) and item.run == run]
            self._ready = deque(item for item in self._ready if item not in waiting)
            self._fail([*waiting, *(order.early.values() if order else ())], reason)

    def fail_gaps(self) -> None:
        """Let requests fail that wait for one that does not come: its client has given up."""
        with self._changed:
            for run, order in self._orders.items():
                if order.early and monotonic() - order.since > GAP_S:
                    self._fail([*order.early.values()], f"request {order.next} to {run} has not come in {GAP_S:.0f} s")
                    order.next = max(order.early) + 1
                    order.early.clear()

    def close(self) -> None:
        """Let all requests fail, those that wait and later ones."""
        with self._changed:
            self.is_closed = True
            early = [turn for order in self._orders.values() for turn in order.early.values()]
            self._fail([*self._ready, *early], "the server is stopping")
            self._ready.clear()

    def _fail(self, items: list[RunJob | SampleJob], reason: str) -> None:
        for item in items:
            self._bytes -= item.num_bytes
            self._futures.end(item.future, Failure(reason, "server"))
