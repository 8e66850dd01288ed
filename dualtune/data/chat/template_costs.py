"""Upper bounds on the memory that an operation of a chat template needs, computed before it runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from sys import getsizeof
from typing import Any, cast

from markupsafe import Markup

from dualtune.data.chat.template_meter import BYTES_PER_PIECE, MAX_INT_BITS, Meter, TemplateLimit

MAX_FORMAT = 1 << 14  # characters of a format string; the pattern below is quadratic
ESCAPED = 5  # &#34; for one character
_WIDE = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")


class Costs:
    """Cost checks. Each method raises TemplateLimit if the meter has no room for the result."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def text_bytes(self, value: Any) -> int:
        """Return an upper bound on the bytes of `str(value)`. Values other than strings are written with escapes."""
        return getsizeof(value) if isinstance(value, str) else 4 * self._meter.size(value)

    def collected(self, items: Any) -> list[Any]:
        if isinstance(items, str):
            self._meter.spend(BYTES_PER_PIECE * len(items))
        return [*items]

    def any(self, arguments: Iterable[Any]) -> None:
        """Check arguments: the callee may format any of them as text, for instance in an error message."""
        for value in arguments:
            if not (value is None or isinstance(value, (str, int))):
                self._meter.require(self.text_bytes(value))

    def escape(self, *values: Any) -> None:
        self._meter.require(ESCAPED * sum(map(self.text_bytes, values)))

    def format(self, text: str, values: Any) -> None:
        if len(text) > MAX_FORMAT or _WIDE.search(text):
            raise TemplateLimit("a format string that is too long, or has a field that is too wide")
        self._meter.require(text.count("%") * 4 * self._meter.size(values))

    def join(self, separator: Any, items: Sequence[Any]) -> None:
        if isinstance(separator, Markup):
            self.escape(*items)
        self._meter.require(sum(map(self.text_bytes, items)) + self.text_bytes(separator) * len(items))

    def replace(self, text: str, old: Any = "", new: Any = "") -> None:
        self._meter.require(text.count(str(old)) * self.text_bytes(new))

    def operator(self, operator: str, left: Any, right: Any) -> None:
        if isinstance(left, Markup) or isinstance(right, Markup):
            self.escape(left, right)
        if operator == "%" and isinstance(left, str):
            self.format(left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str):
                    self._meter.require(times * (getsizeof(value) - getsizeof("")))
                elif isinstance(times, int) and isinstance(value, (list, tuple)):
                    self._meter.require(times * self._meter.size(cast(Any, value)))
        elif (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > MAX_INT_BITS
        ):
            raise TemplateLimit(f"a number of more than {MAX_INT_BITS} bits")

    def method(self, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Check a call of a string method; return the arguments to call it with."""
        require = self._meter.require
        if name == "join" and args:
            args = (self.collected(args[0]),)
            self.join(text, args[0])
        elif name in ("center", "ljust", "rjust", "zfill") and args:
            require(4 * args[0])
        elif name == "expandtabs":
            require(4 * text.count("\t") * (args[0] if args else kwargs.get("tabsize", 8)))
        elif name == "replace":
            self.replace(text, *args[:2])
        elif name in ("split", "rsplit", "splitlines"):
            separator = args[0] if args else kwargs.get("sep")
            pieces = text.count(separator) if separator and isinstance(separator, str) else len(text) // 2
            require(getsizeof(text) + BYTES_PER_PIECE * pieces)
        if name in ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"):
            for arg in args[:1]:
                self._meter.product(len(text), len(arg or ""))
        return args
