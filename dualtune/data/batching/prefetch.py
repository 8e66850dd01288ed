"""Prepare the next step's micro-batches in a thread while the current step runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """Prefetch one step ahead: `self(step)` returns `make(step)`, which is a pure function until `drop` is called.

    A call for any other step than the next one is also correct, but not prefetched.
    """

    def __init__(self, make: Callable[[int], Result], end: int) -> None:
        self._make, self._end = make, end
        self._pool = ThreadPoolExecutor(1, "dualtune-prefetch")
        self._coming: tuple[int, Future[Result]] | None = None

    def __call__(self, step: int) -> Result:
        coming, self._coming = self._coming, None
        result = coming[1].result() if coming and coming[0] == step else self._make(step)
        if step + 1 < self._end:
            self._coming = step + 1, self._pool.submit(self._make, step + 1)
        return result

    def drop(self) -> None:
        """Forget what was prefetched, because `make` gives another result now."""
        self._coming = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
