"""Calls the hooks of a run in such a way that none of them can end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualtune.hooks import Hook

MAX_QUEUED = 10_000  # events kept for a failing hook, such as a tracker without network


@dataclass(slots=True)
class _Watcher:
    hook: Hook
    missed: deque[tuple[str, tuple[Any, ...]]] = field(default_factory=lambda: deque(maxlen=MAX_QUEUED))
    is_failing: bool = False


class Watchers:
    """Calls hooks in the given order, and `report(message)` when one starts to fail."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._watchers = [_Watcher(hook) for hook in hooks]
        self.report: Callable[[str], None] = lambda message: None

    def tell(self, event: str, *args: Any) -> None:
        """Call the method `event` of every hook, after what the hook has missed."""
        for watcher in self._watchers:
            watcher.missed.append((event, args))
            if problem := _deliver(watcher):
                self.report(problem)

    def end(self) -> None:
        """Tell every hook that the run is over, also those that have missed something for good."""
        for watcher in self._watchers:
            _deliver(watcher)
            watcher.missed.clear()
        self.tell("on_end")


def _deliver(watcher: _Watcher) -> str | None:
    """Deliver the queued events to a hook. Return the error message if it has just started to fail."""
    while watcher.missed:
        event, args = watcher.missed.popleft()
        try:
            getattr(watcher.hook, event)(*args)
        except Exception as error:  # noqa: BLE001  foreign code must not end a run of days
            watcher.missed.appendleft((event, args))
            if watcher.is_failing:
                return None
            watcher.is_failing = True
            return (
                f"{type(watcher.hook).__name__}.{event} raised {type(error).__name__}: {error}. "
                "Training continues; the events that it misses are delivered later"
            )
    watcher.is_failing = False
    return None
