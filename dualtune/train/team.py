"""Communication between the processes of a run: what one process learns, all act on.

Every exchange begins with one fixed-size note from each process to all, whatever its topic. So a process that fails can
report its failure in place of the next expected note, and all processes end together, with its error and its exit code.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import DualtuneError, EnvironmentFault, PeerLost, Preempted
from dualtune.base.redaction import redact
from dualtune.base.text import visible
from dualtune.base.world import WAIT_VARIABLE, Alone, World, wait_limit_s

# ----------------------------------------------------------------------------------------------------------------------
# A timeout for waiting on other processes: a hung collective blocks in a library, where no exception reaches it.


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
        self._wait: tuple[str, float] | None = None  # for whom it waits, and since when
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, whom: str) -> Generator[None]:
        """Time the block, which may wait for another process."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dualtune-watchdog", daemon=True)
            self._thread.start()
        self._wait = whom, time.monotonic()
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


# ----------------------------------------------------------------------------------------------------------------------
_NOTE = struct.Struct("<?ddd")  # has this process failed; three numbers
_TEXT_BYTES = 1024
BY_ANOTHER = "Stopped: another process of the run was asked to stop"
_DTYPE, _SHAPE, _BYTES = "dtype", "shape", "base64"  # of an array in JSON
_NEWS_S = 2.0  # after which a process that works for itself says again that it does

T = TypeVar("T")


class PeerFailed(DualtuneError):
    """Another process of the run has failed. It has the exit code of that process, because it has the same cause."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Team:
    """The operations of the training loop on a world of processes. In a world of one, every method returns at once."""

    def __init__(self, world: World | None = None, watchdog: Watchdog | None = None) -> None:
        self._world = world or Alone()
        self._watchdog = watchdog or Watchdog()
        self.rank, self.size = self._world.rank, self._world.size
        self._can_tell = True  # a failure
        self._news_due = 0.0  # in `apart`, by the monotonic clock

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that owns the run directory and the terminal."""
        return self.rank == 0

    def agree(self, wish: bool) -> bool:
        """Return whether `wish` is true in any process."""
        return self.total(wish)[0] > 0

    def check(self) -> None:
        """Raise PeerFailed if another process has failed."""
        self.agree(False)

    def poll(self, stop: bool, too_many: int = 0) -> int:
        """Raise Preempted if any process has been asked to stop; else return the largest `too_many` of all processes.

        `too_many` is the number of tokens with which a process ran out of memory; 0 if it did not.
        """
        notes = [(False, stop, too_many)] if self.size == 1 else self._exchange(stop, too_many)
        if any(note[1] for note in notes):
            raise interrupt.stopped() or Preempted(BY_ANOTHER)
        return max(int(note[2]) for note in notes)

    def total(self, *numbers: float) -> tuple[float, ...]:
        """Return the sums of up to three numbers over all processes, bitwise equal in each."""
        if self.size == 1:
            return tuple(map(float, numbers))
        notes = self._exchange(*numbers)
        return tuple(sum(note[i] for note in notes) for i in range(1, 1 + len(numbers)))

    def totals(self, numbers: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the sums of any number of numbers over all processes, float64, which must give equally many."""
        values = np.asarray(numbers, np.float64)
        return np.sum([np.frombuffer(part) for part in self.gather(values.tobytes())], axis=0)

    def most(self, number: int) -> int:
        """Return the largest of the numbers of all processes."""
        return number if self.size == 1 else int(max(note[1] for note in self._exchange(number)))

    @property
    def share(self) -> slice:
        """Which of a list of tasks this process does."""
        return slice(self.rank, None, self.size)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every process, by rank, of whatever lengths."""
        if self.size == 1:
            return [data]
        lengths = [int(note[1]) for note in self._exchange(len(data))]
        if not max(lengths):
            return [b""] * self.size
        with self.waiting("the other processes"):
            parts = self._world.gather(data.ljust(max(lengths), b"\0"))
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def collect(self, records: Sequence[T], read: Callable[[dict[str, Any]], T]) -> list[T]:
        """Return the records of all processes, by rank: dataclasses of JSON values and arrays, which `read` makes."""
        if self.size == 1:
            return list(records)
        parts = self.gather(json.dumps(records, default=_as_json).encode())
        return [read(record) for part in parts for record in json.loads(part, object_hook=_from_json)]

    def broadcast(self, data: bytes = b"") -> bytes:
        """Return the first process's data in all processes; only the first must know its length."""
        if self.size == 1:
            return data
        length = int(self._exchange(len(data) if self.is_first else 0)[0][1])
        with self.waiting("the first process"):
            return self._world.broadcast(data if self.is_first else bytes(length))

    @contextlib.contextmanager
    def in_turn(self) -> Generator[None]:
        """Run the block in the first process, and then in the others, without a time limit."""
        if not self.is_first:
            self._exchange(watched=False)
        yield
        if self.is_first:
            self._exchange(watched=False)

    @contextlib.contextmanager
    def apart(self) -> Generator[None]:
        """Let each process work for itself in the block, in which it polls for signals; all leave it together.

        They hear of each other every few seconds, so that no one waits for a process that has failed or hangs, however
        long the work of the others takes, and a signal to one stops all.
        """
        if self.size == 1:
            yield
            return
        self._news_due = time.monotonic() + _NEWS_S
        with interrupt.polled_by(self._tell_news):
            yield
        while not self.all_done(True):
            pass

    @contextlib.contextmanager
    def in_step(self, idle: Callable[[], object]) -> Generator[None]:
        """As `apart`, for work of which each part needs all processes: each calls `all_done(False)` before its own.

        A process that is done is `idle` where another is not.
        """
        with interrupt.polled_by(lambda: None):  # each part asks
            yield
        while not self.all_done(True):
            idle()

    def _tell_news(self) -> None:
        if interrupt.requested() or time.monotonic() >= self._news_due:
            self.all_done(False)

    def all_done(self, is_done: bool) -> bool:
        """Return whether the work of all processes is done. Raise Preempted if any has been asked to stop."""
        notes = self._exchange(is_done, interrupt.requested())
        if any(note[2] for note in notes):
            raise interrupt.stopped() or Preempted(BY_ANOTHER)
        self._news_due = time.monotonic() + _NEWS_S
        return all(note[1] for note in notes)

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """If the block raises in this process, raise in all. The others must be about to exchange something."""
        try:
            yield
        except PeerFailed:
            raise
        except PeerLost:
            self.check()  # another process may report the cause
            raise
        except Exception as error:
            if self.size > 1 and self._can_tell:
                with contextlib.suppress(PeerFailed, EnvironmentFault):  # they may have failed too, or be gone
                    self._tell_failure(error)
            raise

    @contextlib.contextmanager
    def in_engine(self) -> Generator[None]:
        """Context for an engine's own exchange: the others cannot be told of a failure in it, but see the process end.

        They wait for what the engines exchange, so that a note of this process would never be read.
        """
        self._can_tell = False
        yield
        self._can_tell = True

    def waiting(self, whom: str) -> contextlib.AbstractContextManager[None]:
        """Let the watchdog time the block, which may wait for other processes."""
        if self.size == 1:
            return contextlib.nullcontext()
        return self._watchdog.waiting(f"{whom} (this is process {self.rank} of {self.size})")

    def _exchange(
        self, a: float = 0.0, b: float = 0.0, c: float = 0.0, *, watched: bool = True
    ) -> list[tuple[bool, float, float, float]]:
        with self.waiting("the other processes") if watched else contextlib.nullcontext():
            notes = [_NOTE.unpack(note) for note in self._world.gather(_NOTE.pack(False, a, b, c))]
            failed = next((rank for rank, note in enumerate(notes) if note[0]), None)
            if failed is not None:
                text = self._world.gather(bytes(_TEXT_BYTES))[failed].rstrip(b"\0").decode(errors="replace")
                raise PeerFailed(f"process {failed} of {self.size} has failed: {text}", int(notes[failed][1]))
        return notes

    def _tell_failure(self, error: Exception) -> None:
        code = error.exit_code if isinstance(error, DualtuneError) else 1
        text = redact(f"{type(error).__name__}: {error}").encode()[:_TEXT_BYTES]
        with self.waiting("the other processes"):
            self._world.gather(_NOTE.pack(True, code, 0.0, 0.0))
            self._world.gather(text.ljust(_TEXT_BYTES, b"\0"))


def _as_json(value: Any) -> Any:
    """Return what JSON can write of a record, or of an array."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray", value)
        return {_DTYPE: array.dtype.str, _SHAPE: array.shape, _BYTES: base64.b64encode(array.tobytes()).decode()}
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _from_json(value: dict[str, Any]) -> Any:
    if _BYTES not in value:
        return value
    return np.frombuffer(base64.b64decode(value[_BYTES]), value[_DTYPE]).reshape(value[_SHAPE])
