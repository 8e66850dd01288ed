"""A Jinja environment for untrusted templates: a chat template comes with a model, and models come from anywhere.

Jinja's sandbox protects Python's internals, but does not limit time or memory. Here every step that can be slow or
allocate memory is metered: the parsed template is rewritten so that loops, literals, `~`, `[:]` and comparisons report
to the meter (`template_nodes.py`), filters and tests are wrapped (`template_builtins.py`), and calls, operators and
outputs report through Jinja's hooks. The result size of operations that can grow at once (`'a' * n`, `replace`, `join`,
padding, …) is computed first (`template_costs.py`). Text and lists that a template creates are charged and never
refunded, which also bounds the memory it holds. Two more rules: no container exceeds the limit, where an item counts
once for each place that it is in, and no unmetered step costs more than one walk through such a container.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_eval_context
from markupsafe import Markup

from dualtune.data.chat.template_builtins import Builtins
from dualtune.data.chat.template_costs import MAX_FORMAT, Costs
from dualtune.data.chat.template_meter import Meter, TemplateLimit
from dualtune.data.chat.template_nodes import CHARGE, CHECK_TIME, COLLECT, CONCAT, TICK, Instrument

# The longest template in use, 25,000 characters, has 6,000. Compiling takes about 25 µs per token.
MAX_TOKENS = 30_000
_DIGITS = re.compile(r"\d{4,}")

_STR_METHODS = (
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
    "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
    "startswith strip swapcase title upper zfill"
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    Markup: frozenset(_STR_METHODS.split()) - {"format", "format_map"},
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
}
# Jinja's own types; its sandbox handles their attributes.
_RUNTIME = (LoopContext, Macro, Namespace, Cycler, Joiner, TemplateReference, BlockReference, Undefined)


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` around assistant turns."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Limit the number of tokens before parsing, which bounds the time of all later steps."""
        for number, token in enumerate(stream):
            if number == MAX_TOKENS:
                raise TemplateSyntaxError(f"more than {MAX_TOKENS} Jinja tokens", token.lineno)
            yield token

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        cast(Sandbox, self.environment).marks_turns = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.EnvironmentAttribute("mark_turn"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body, lineno=lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one template, with one render at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        self.meter = Meter()
        self.marks_turns = False  # the template has generation markers
        self.written = 0  # characters of output so far, for `turns`
        self.turns: list[tuple[int, str]] = []  # start and text of each generation block
        # Not optimized: no expression may be evaluated at compile time.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._output,
            extensions=[_Generation, loopcontrols],
        )  # fmt: skip
        self._costs = Costs(self.meter)
        builtins = Builtins(self, self.meter, self._costs)
        self.tests = builtins.tests()
        self.filters = builtins.filters() | {
            TICK: self.meter.tick,
            CHECK_TIME: self._timed,
            CHARGE: self.meter.charged,
            CONCAT: self._concat,
            COLLECT: self._costs.collected,
        }
        self.globals = {
            "range": self.globals["range"], "dict": _new_dict, "namespace": _Namespace, "cycler": Cycler,
            "joiner": Joiner, "raise_exception": self._raise_exception,
        }  # fmt: skip

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Instrument().visit(source), *args, **kwargs)

    def mark_turn(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.turns.append((self.written, text))
        return text

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(
            argument, (list, tuple, dict, Namespace)
        ):  # a failed lookup would keep the argument, and print it after it has grown
            raise SecurityError("only text and numbers can be keys")
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in _METHODS:
            return attr in _METHODS[type(obj)]
        return isinstance(obj, _RUNTIME) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = cast(str, value.__self__)
        if isinstance(text, Markup):
            raise SecurityError("format of escaped text is not available to chat templates")
        if len(text) > MAX_FORMAT:
            raise TemplateLimit(f"a format string of more than {MAX_FORMAT} characters")
        formatter = _Formatter(self, self.meter)
        if value.__name__ == "format_map":
            return functools.partial(formatter.vformat, text, ())
        return formatter.of(text)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.meter.check_time()
        text = getattr(obj, "__self__", None)
        of_text = isinstance(text, str)
        self._costs.any(args)
        if of_text:
            if isinstance(text, Markup):
                self._costs.escape(*args)
            args = self._costs.method(text, obj.__name__, args, kwargs)
        return self.meter.charged(super().call(context, obj, *args, **kwargs), deeply=of_text)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._costs.operator(operator, left, right)
        return self.meter.charged(super().call_binop(context, operator, left, right))

    @pass_eval_context  # tells the compiler not to evaluate it at compile time
    def _output(self, context: Any, value: Any) -> Any:
        self.meter.spend(self._costs.text_bytes(value))
        return value

    def _timed(self, value: Any) -> Any:
        self.meter.check_time()
        return value

    def _concat(self, parts: tuple[Any, ...]) -> str:
        self.meter.spend(sum(map(self._costs.text_bytes, parts)))
        return "".join(map(str, parts))

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(str(message))


class _Formatter(SandboxedFormatter):
    """`str.format` that charges each field before formatting it."""

    def __init__(self, env: Sandbox, meter: Meter) -> None:
        super().__init__(env)
        self._meter = meter

    def of(self, text: str) -> Callable[..., str]:
        return lambda *args, **kwargs: self.vformat(text, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._meter.spend(4 * self._meter.size(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if _DIGITS.search(format_spec):
            raise TemplateLimit("a format string with a field that is too wide")
        return super().format_field(value, format_spec)


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, as in transformers."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes: dict[str, Any] = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace does not allow names that begin with an underscore: {name}")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
