"""The sessions of clients, with the runs and the samplers of each. They live as long as their client is heard from."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from dualtune.base.http_server import BadRequest

MAX_SESSIONS, MAX_SAMPLERS = 1000, 10_000


@dataclass(slots=True, eq=False)
class TinkerSession:
    id: str
    number: int  # in the order in which sessions began here
    display_name: str | None
    metadata: Mapping[str, Any] | None
    created: float = field(default_factory=time.time)
    heard: float = field(default_factory=monotonic)
    runs: list[str] = field(default_factory=lambda: list[str]())
    samplers: list[str] = field(default_factory=lambda: list[str]())


@dataclass(slots=True, eq=False)
class Sampler:
    """What samples are drawn from: a checkpoint, weights in memory, what a run publishes, or the base."""

    id: str
    source: str | None  # None: the base
    follows: str | None = None  # the run whose newest published weights it has
    clones: int = 0


class Sessions:
    """The sessions of a server. Any thread may call these."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._sessions: dict[str, TinkerSession] = {}
        self._samplers: dict[str, Sampler] = {}
        self._num_begun = 0
        self._published: dict[str, str] = {}  # by run: its weights in memory that its following samplers have

    def __iter__(self) -> Iterator[TinkerSession]:
        with self._lock:
            return iter([*self._sessions.values()])

    def create(self, display_name: str | None, metadata: Mapping[str, Any] | None) -> TinkerSession:
        """Begin a session."""
        id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        with self._lock:
            if len(self._sessions) >= MAX_SESSIONS:
                raise BadRequest(429, f"{MAX_SESSIONS} sessions are open; try again later")
            session = self._sessions[id] = TinkerSession(id, self._num_begun, display_name, metadata)
            self._num_begun += 1
            return session

    def get(self, id: str) -> TinkerSession:
        """Return a session, whose client has been heard from just now. BadRequest 410 if there is none."""
        with self._lock:
            session = self._sessions.get(id)
            if session is None:
                raise BadRequest(
                    410, f"session_id: {id} is not a session here: it has ended, or the server was restarted"
                )
            session.heard = monotonic()
            return session

    def hear_of(self, run: str) -> None:
        """Note that the client of a run is there."""
        with self._lock:
            if (session := self._sessions.get(run.split(":")[0])) is not None:
                session.heard = monotonic()

    def late(self) -> list[str]:
        """Return the sessions whose clients have not been heard from in time."""
        with self._lock:
            return [s.id for s in self._sessions.values() if monotonic() - s.heard > self._timeout_s]

    def end(self, id: str) -> TinkerSession | None:
        """Forget a session with its samplers."""
        with self._lock:
            session = self._sessions.pop(id, None)
            for sampler in session.samplers if session else ():
                self._samplers.pop(sampler, None)
            for run in session.runs if session else ():
                self._published.pop(run, None)
            return session

    def add_run(self, session: str, number: int) -> str:
        """Return the id of a run, which the client can make too."""
        with self._lock:
            run = f"{session}:train:{number}"
            runs = self.get(session).runs
            if run not in runs:
                runs.append(run)
            return run

    def add_sampler(self, session: str, number: int, source: str | None, *, follows: str | None = None) -> Sampler:
        """Add a sampler of a checkpoint, of weights in memory, or of the base; the one with this number if it is there.

        One that follows a run has the newest weights that were published for those that do.
        """
        with self._lock:
            samplers, id = self.get(session).samplers, f"{session}:sample:{number}"
            if id not in self._samplers:
                if len(samplers) >= MAX_SAMPLERS:
                    raise BadRequest(400, f"the session has {MAX_SAMPLERS} samplers, which is all it may have")
                samplers.append(id)
                self._samplers[id] = Sampler(id, source, follows)
            if follows is not None and source is not None:
                self._published[follows] = source
            return self._samplers[id]

    def sampler(self, id: str) -> Sampler:
        """Return a sampler. BadRequest 404 if there is none."""
        with self._lock:
            if (sampler := self._samplers.get(id)) is None:
                raise BadRequest(404, f"sampling_session_id: {id} is not here: its session has ended")
            return sampler

    def source(self, sampler: Sampler) -> str | None:
        """Return the checkpoint or the weights that a sampler has now; None: the base."""
        with self._lock:
            self.hear_of(sampler.id)
            return sampler.source if sampler.follows is None else self._published.get(sampler.follows, sampler.source)

    def join(self, id: str) -> int:
        """Return the number of a further client of a sampler."""
        with self._lock:
            sampler = self.sampler(id)
            sampler.clones += 1
            return sampler.clones
