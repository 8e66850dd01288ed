"""Jinja's filters and tests for chat templates; each one refuses calls that would use too much."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import getsizeof
from typing import Any

from jinja2 import Environment, filters, tests

from dualtune.data.chat.template_costs import Costs
from dualtune.data.chat.template_meter import BYTES_PER_PIECE, Meter, TemplateLimit

MAX_PATH = 1000  # characters of an attribute path; each part is looked up in each item

_FILTERS = (
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int items join last "
    "length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string title "
    "trim truncate unique upper"
)
# They convert any value to text.
_OF_TEXT = (
    "capitalize", "e", "escape", "format", "indent", "lower", "replace", "string", "title", "trim", "truncate", "upper",
)  # fmt: skip
_OF_EACH = ("map", "select", "reject", "selectattr", "rejectattr")  # they process their items one by one
# They compute a key of every item; the number is the position of the attribute path in the arguments.
_BY_KEY = {"sort": 2, "unique": 1, "min": 1, "max": 1, "groupby": 0}
_PATH_AT = {**_BY_KEY, "join": 1, "selectattr": 0, "rejectattr": 0}
_COMPARING = "eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >= in"
_MODULO = ("divisibleby", "even", "odd")  # value % number, which formats if the value is a string


class Builtins:
    """The filters and tests of one environment."""

    def __init__(self, environment: Environment, meter: Meter, costs: Costs) -> None:
        self._environment, self._meter, self._costs = environment, meter, costs

    def filters(self) -> dict[str, Callable[..., Any]]:
        found = {name: self._filter(name, filters.FILTERS[name]) for name in _FILTERS.split()}
        return found | {"tojson": self._filter("tojson", self._to_json)}

    def tests(self) -> dict[str, Callable[..., Any]]:
        """Return all tests. Those not metered here have constant cost."""
        metered = (*_COMPARING.split(), *_MODULO, "lower", "upper")
        return tests.TESTS | {name: self._test(name, tests.TESTS[name]) for name in metered}

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        hidden = hasattr(function, "jinja_pass_arg")  # Jinja passes its context as the first argument

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._meter.check_time()
            before, (value, *rest) = args[:hidden], args[hidden:]
            value = self._before_filter(name, value, rest, kwargs)
            return self._meter.charged(function(*before, value, *rest, **kwargs))

        return run

    def _test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(value: Any, *args: Any) -> Any:
            self._meter.check_time()
            if name in ("lower", "upper"):
                self._meter.require(self._costs.text_bytes(value))
            elif name in _MODULO and isinstance(value, str):
                self._costs.format(value, args)
            return function(value, *args)

        return run

    def _before_filter(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Refuse a filter call that would use too much; return the value to call it with."""
        self._costs.any(args)
        self._costs.any(kwargs.values())
        path = _argument(args, kwargs, _PATH_AT.get(name), "attribute")
        if isinstance(path, str) and len(path) > MAX_PATH:
            raise TemplateLimit(f"an attribute path of more than {MAX_PATH} characters")
        if name in _OF_TEXT:
            self._before_text(name, value, args, kwargs)
        elif name in _OF_EACH:
            value = self._one_by_one(value)
        elif name in _BY_KEY:
            value = self._costs.collected(value)
            for key in map(filters.make_multi_attrgetter(self._environment, path), value):
                self._meter.spend(self._costs.text_bytes(key))
        elif name == "list":
            value = self._costs.collected(value)
        elif name == "dictsort":
            self._meter.spend(self._costs.text_bytes(value))
        elif name == "join":
            value = self._costs.collected(value)
            items = map(filters.make_attrgetter(self._environment, path), value)
            self._costs.join(_argument(args, kwargs, 0, "d") or "", [*items])
        elif name == "round":
            if isinstance(value, (str, list, tuple)):  # it would be multiplied by 10 ** precision
                raise TypeError("round: a number is needed")
            if abs(_argument(args, kwargs, 0, "precision") or 0) > 100:
                raise TemplateLimit("round to more than 100 digits")
        return value

    def _before_text(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        meter = self._meter
        pieces = len(value) if isinstance(value, str) and name in ("indent", "title") else 0
        meter.require(self._costs.text_bytes(value) + BYTES_PER_PIECE // 2 * pieces)
        if name in ("e", "escape"):
            self._costs.escape(value)
        elif name == "trim":
            meter.product(len(str(value)), len(_argument(args, kwargs, 0, "chars") or ""))
        elif name == "format":
            self._costs.format(str(value), (*args, kwargs))
        elif name == "replace":
            self._costs.replace(str(value), _argument(args, kwargs, 0, "old"), _argument(args, kwargs, 1, "new"))
        elif name == "indent":
            width = args[0] if args else kwargs.get("width", 4)
            lines = len(str(value).splitlines()) + 1
            meter.require(4 * lines * (len(width) if isinstance(width, str) else width))

    def _one_by_one(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items and check the limits for each one, including those that the filter drops."""
        for item in items:
            self._meter.spend(0)
            yield item

    def _to_json(
        self, x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """Write JSON as transformers does; Jinja's own filter escapes for HTML."""
        for option in (indent, *(separators or ())):
            if option is not None and (len(option) if isinstance(option, str) else option) > 100:
                raise TemplateLimit("tojson with an indent or separators of more than 100 characters")
        self._meter.require(6 * self._meter.size(x))
        options: dict[str, Any] = {
            "ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys,
        }  # fmt: skip
        if indent is None:
            return json.dumps(x, **options)
        pieces: list[str] = []  # one by one, because a deep value has much indentation
        for piece in json.JSONEncoder(**options).iterencode(x):
            self._meter.spend(getsizeof(piece))
            pieces.append(piece)
        return "".join(pieces)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: int | None, name: str) -> Any:
    return args[at] if at is not None and at < len(args) else kwargs.get(name)
