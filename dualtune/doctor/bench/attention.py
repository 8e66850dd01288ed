"""The time and memory of causal attention at a length: a backend's own, its framework's, and plain matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol, cast

from dualtune.base.errors import ConfigError
from dualtune.base.text import in_bytes
from dualtune.engine.backend import Backend

EAGER = "eager"  # the work that the others are compared with
WARM_UP = 1  # rounds
SCORES = 6  # tensors of all scores that eager attention has at once, forward and backward, in 4 bytes


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One document of one row, as a layer of a model sees it."""

    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str

    @property
    def eager_bytes(self) -> int:
        """What eager attention takes, about."""
        return SCORES * 4 * self.heads * self.tokens**2


class TimesAttention(Protocol):
    """A backend that takes part. A work is a forward and a backward pass, complete when it returns, and gives the
    output and the gradients of queries, keys and values."""

    def attention_works(self, shape: Any) -> Mapping[str, Callable[[], Any]]: ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """Return the most bytes that the work has allocated at a time."""
        ...


def time_attention(
    backend: Backend, shape: AttentionShape, *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Measure each work in turns: seconds of every round by the clock, their median, and the peak of memory.

    Ratios are those to eager attention, below 1 where a work takes less. ConfigError for a backend that takes no part
    and for a shape whose scores do not fit into the device.
    """
    if not hasattr(backend, "attention_works"):
        raise ConfigError(f"--platform: the backend '{backend.name}' has no attention to time. Use another")
    device = backend.devices()[0]
    if shape.eager_bytes > device.total_bytes:
        raise ConfigError(
            f"--tokens {shape.tokens}, --heads {shape.heads}: eager attention keeps about "
            f"{in_bytes(shape.eager_bytes)} of scores, and {device.name} has {in_bytes(device.total_bytes)}. Give less"
        )
    timer = cast(TimesAttention, backend)
    works = timer.attention_works(shape)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(WARM_UP + rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            began = clock()
            works[name]()
            seconds[name].append(clock() - began)
    ms = {name: 1000 * median(times[WARM_UP:]) for name, times in seconds.items()}
    peaks = {name: timer.peak_of(work) for name, work in works.items()}
    results = {
        name: {
            "seconds": seconds[name][WARM_UP:], "ms": ms[name], "peak_bytes": peaks[name],
            "time_ratio": ms[name] / ms[EAGER], "memory_ratio": peaks[name] / peaks[EAGER],
        }
        for name in works
    }  # fmt: skip
    return {"shape": asdict(shape), "works": results}
