"""Calls the hooks of a run in such a way that none of them can end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualtune.errors import DualtuneError
from dualtune.hooks import MOMENTS, Hook

MAX_QUEUED = 10_000  # events kept for a failing hook, such as a tracker without network


@dataclass(slots=True)
class _Watcher:
    hook: Hook
    missed: deque[tuple[str, tuple[Any, ...]]] = field(default_factory=lambda: deque(maxlen=MAX_QUEUED))
    failing: set[str] = field(default_factory=lambda: set[str]())  # the events that fail, and were reported


class Watchers:
    """Calls hooks in the given order, and `report(message)` when one starts to fail."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._watchers = [_Watcher(hook) for hook in hooks]
        self._listeners = {moment: [w for w in self._watchers if _overrides(w.hook, moment)] for moment in MOMENTS}
        self.report: Callable[[str], None] = lambda message: None

    def tell(self, event: str, *args: Any) -> None:
        """Call the method `event` of every hook, after what the hook has missed."""
        for watcher in self._watchers:
            watcher.missed.append((event, args))
            self._report(_deliver(watcher))

    def listen_to(self, *moments: str) -> bool:
        """Return whether a hook overrides one of these moments."""
        return any(self._listeners[moment] for moment in moments)

    def tell_now(self, moment: str, *args: Any) -> None:
        """Call the method `moment` of the hooks that override it. A hook that fails misses it for good."""
        for watcher in self._listeners[moment]:
            self._report(_deliver(watcher))
            if not watcher.missed:
                self._report(_call(watcher, moment, args))

    def end(self) -> None:
        """Tell every hook that the run is over, also those that have missed something for good."""
        for watcher in self._watchers:
            _deliver(watcher)
            watcher.missed.clear()
        self.tell("on_end")

    def _report(self, problem: str | None) -> None:
        if problem:
            self.report(problem)


def _overrides(hook: Hook, moment: str) -> bool:
    return getattr(type(hook), moment) is not getattr(Hook, moment)


def _deliver(watcher: _Watcher) -> str | None:
    """Deliver the queued events to a hook. Return the error message if it has just started to fail."""
    while watcher.missed:
        event, args = watcher.missed.popleft()
        problem = _call(watcher, event, args)
        if event in watcher.failing:
            watcher.missed.appendleft((event, args))
            return problem
    return None


def _call(watcher: _Watcher, event: str, args: tuple[Any, ...]) -> str | None:
    """Call a hook, and note whether it fails. Return the error message if this event has just started to fail."""
    try:
        getattr(watcher.hook, event)(*args)
    except Exception as error:  # noqa: BLE001  foreign code must not end a run of days
        if event in watcher.failing:
            return None
        watcher.failing.add(event)
        later = "such moments are not repeated" if event in MOMENTS else "the events that it misses are delivered later"
        problem = f"{type(watcher.hook).__name__}.{event} raised {type(error).__name__}: {error}"
        problem = str(error) if isinstance(error, DualtuneError) else problem  # one of ours is written for people
        return problem if event == "on_end" else f"{problem}. Training continues; {later}"
    if event not in MOMENTS:  # of which there are thousands: only the first failure is reported
        watcher.failing.discard(event)
    return None
