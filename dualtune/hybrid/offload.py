"""Where the optimizer's state is while a prediction is searched, which needs forward passes only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

from dualtune.backend import Engine


class OffloadsOptimizer(Protocol):
    """An engine whose backend honours hybrid.offload: optimizer, because its device has memory of its own."""

    def offloaded_optimizer(self) -> AbstractContextManager[None]:
        """Keep the optimizer's state in host memory inside the block. Afterwards it is bitwise the same."""
        ...


def offloaded(engine: Engine, what: str) -> AbstractContextManager[None]:
    """Return the block of a search with this value of hybrid.offload."""
    return nullcontext() if what == "none" else cast(OffloadsOptimizer, engine).offloaded_optimizer()
