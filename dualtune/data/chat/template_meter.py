"""Limits on one render of a chat template: CPU time and bytes allocated."""

from __future__ import annotations

import time
import types
from collections.abc import Iterable, Iterator
from sys import getsizeof
from typing import Any, cast

from jinja2.utils import Namespace

from dualtune import interrupt
from dualtune.errors import DataError

# For one render: a base allowance, and an additional one per byte of input.
CPU_S, CPU_S_PER_BYTE = 1.0, 1 / 2**20
MEMORY_BYTES, MEMORY_PER_BYTE = 16 * 2**20, 32
TICKS_PER_CHECK = 16  # reading the clock costs more than a tick
LONG_BYTES = 1 << 16  # an allocation of this size checks the clock at once
MAX_INT_BITS = 4096
MAX_PRODUCT = 2**30  # character comparisons in one search from the right or one strip
BYTES_PER_PIECE = 64  # a small string and its slot in a list


class TemplateLimit(DataError):
    """A chat template took too long or used too much memory: the template is broken or hostile, not the row."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"data.template: the chat template was stopped: {what}. No normal template needs so much for one "
            "conversation. Set data.template to another Jinja file, and do not trust this model's files"
        )


class Meter:
    """The remaining budget of one render. Bytes are charged on allocation and never refunded."""

    __slots__ = ("_allowed_s", "_cpu_deadline_s", "_deadline_s", "_left", "_limit", "_ticks")

    def __init__(self) -> None:
        self.start(())

    def start(self, given: Any) -> None:
        """Start a render of `given`."""
        self._deadline_s, self._left, self._limit, self._ticks = float("inf"), 2**62, 2**62, 0
        self._cpu_deadline_s: float | None = None
        given_bytes = self.size(given)
        self._left = self._limit = MEMORY_BYTES + MEMORY_PER_BYTE * given_bytes
        self._allowed_s = CPU_S + CPU_S_PER_BYTE * given_bytes
        self._deadline_s = time.perf_counter() + self._allowed_s

    def spend(self, amount: int) -> None:
        self._left -= amount
        self._ticks += 1
        if self._left < 0:
            self._too_large()
        if not self._ticks % TICKS_PER_CHECK or amount > LONG_BYTES:
            self.check_time()

    def tick(self, _: None) -> None:
        self.spend(0)

    def check_time(self) -> None:
        interrupt.poll()
        if time.perf_counter() < self._deadline_s:
            return
        # From here on the CPU time of this thread counts, so that a busy machine does not stop the template. It is not
        # read earlier, because reading it takes as long as a short render.
        now_s = time.thread_time()
        if self._cpu_deadline_s is None:
            self._cpu_deadline_s = now_s + self._allowed_s
        elif now_s > self._cpu_deadline_s:
            raise TemplateLimit(f"more than {CPU_S:g} s of CPU time for one conversation")

    def require(self, amount: int) -> None:
        """Raise TemplateLimit if `amount` bytes do not fit. The caller charges them afterwards."""
        if amount > self._left:
            self._too_large()

    def product(self, a: int, b: int) -> None:
        if a * b > MAX_PRODUCT:
            raise TemplateLimit(f"a search of {a} times {b} characters")

    def size(self, value: Any) -> int:
        """Return the bytes of a value as a tree: a shared part counts each time, as it would when printed."""
        self.check_time()
        total, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            total += getsizeof(item)
            if total > self._limit:
                self._too_large()
            if isinstance(item, Namespace):
                item = getattr(item, "_Namespace__attrs")  # noqa: B009 (its name is mangled)
            if isinstance(item, dict):
                waiting += cast(dict[Any, Any], item).keys()
                waiting += cast(dict[Any, Any], item).values()
            elif isinstance(item, (list, tuple)):
                waiting += cast(Iterable[Any], item)
        return total

    def charged(self, value: Any, *, deeply: bool = False) -> Any:
        """Charge a new value and return it. `deeply` also charges its items, if they are new too."""
        if isinstance(value, str):
            self.spend(getsizeof(value))
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateLimit(f"a number of more than {MAX_INT_BITS} bits")
        elif isinstance(value, (list, tuple, dict)):
            size = self.size(cast(Any, value))
            self.spend(size if deeply else getsizeof(cast(Any, value)))
        elif isinstance(value, types.GeneratorType):
            return self._stream(cast(Iterator[Any], value))
        else:
            self.spend(BYTES_PER_PIECE)
        return cast(Any, value)

    def _stream(self, items: Iterator[Any]) -> Iterator[Any]:
        """Limit the total size of what `map` and similar filters yield, because a template can collect it in a list."""
        total = 0
        for item in items:
            total += self.size(item)
            if total > self._limit:
                self._too_large()
            self.spend(8)
            yield item

    def _too_large(self) -> None:
        raise TemplateLimit(f"more than {self._limit >> 20} MiB of text and lists for one conversation")
