"""A Jinja environment for untrusted templates: a chat template comes with a model, and models come from anywhere.

Jinja's sandbox protects Python's internals, but does not limit time or memory. Here every step that can be slow or
allocate memory is metered: the parsed template is rewritten so that loops, literals, `~`, `[:]` and comparisons report
to the meter (`Instrument`), filters and tests are wrapped (`Builtins`), and calls, operators and outputs report through
Jinja's hooks (`Sandbox`). The result size of operations that can grow at once (`'a' * n`, `replace`, `join`, padding,
…) is computed first (`Costs`). Text and lists that a template creates are charged and never refunded, which also bounds
the memory it holds. Two more rules: no container exceeds the limit, where an item counts once for each place that it is
in, and no unmetered step costs more than one walk through such a container. Decision 0049 says why this is not done by
a process with limits.
"""

from __future__ import annotations

import functools
import json
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import getsizeof
from typing import Any, cast

from jinja2 import Environment, filters, nodes, tests
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from dualtune.base import interrupt
from dualtune.base.errors import DataError

# ----------------------------------------------------------------------------------------------------------------------
# The meter: what one render may use, a base allowance and an additional one per byte of input.

CPU_S, CPU_S_PER_BYTE = 1.0, 1 / 2**20
MEMORY_BYTES, MEMORY_PER_BYTE = 16 * 2**20, 32
TICKS_PER_CHECK = 16  # reading the clock costs more than a tick
LONG_BYTES = 1 << 16  # an allocation of this size checks the clock at once
MAX_INT_BITS = 4096
MAX_PRODUCT = 2**30  # character comparisons in one search from the right or one strip
BYTES_PER_PIECE = 64  # a small string and its slot in a list


class TemplateLimit(DataError):
    """A chat template took too long or used too much memory: the template is broken or hostile, not the row."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"data.template: the chat template was stopped: {reason}. No normal template needs so much for one "
            "conversation. Set data.template to another Jinja file, and do not trust this model's files"
        )


class Meter:
    """The remaining budget of one render. Bytes are charged on allocation and never refunded."""

    __slots__ = ("_allowed_s", "_cpu_deadline_s", "_deadline_s", "_limit", "_remaining", "_ticks")

    def __init__(self) -> None:
        self.start(())

    def start(self, inputs: Any) -> None:
        """Start a render of `inputs`."""
        self._deadline_s, self._remaining, self._limit, self._ticks = float("inf"), 2**62, 2**62, 0
        self._cpu_deadline_s: float | None = None
        input_bytes = self.size(inputs)
        self._remaining = self._limit = MEMORY_BYTES + MEMORY_PER_BYTE * input_bytes
        self._allowed_s = CPU_S + CPU_S_PER_BYTE * input_bytes
        self._deadline_s = time.perf_counter() + self._allowed_s

    def spend(self, amount: int) -> None:
        self._remaining -= amount
        self._ticks += 1
        if self._remaining < 0:
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
        if amount > self._remaining:
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


# ----------------------------------------------------------------------------------------------------------------------
# Upper bounds on the memory that an operation needs, computed before it runs.

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


# ----------------------------------------------------------------------------------------------------------------------
# The parsed template, rewritten so that each step that can be expensive reports to the meter.

# Names that are not valid in a template.
TICK, CHECK_TIME, CHARGE, CONCAT, COLLECT = "<tick>", "<check time>", "<charge>", "<concat>", "<collect>"
_REFUSED = (nodes.EvalContextModifier, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class Instrument(NodeTransformer):
    """Rewrites a parsed template so that it reports to the meter. Its output does not change."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED):
            name = "autoescape" if isinstance(node, nodes.EvalContextModifier) else type(node).__name__.lower()
            raise TemplateSyntaxError(f"{name} is not available to chat templates", node.lineno)
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = _filter(nodes.Const(None), TICK, node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # template data bypasses `finalize`, constants do not

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load"), CONCAT, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Check the clock at each comparison of a chain, except one with a constant: the source bounds its cost."""
        self.generic_visit(node)
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            has_constant = isinstance(left, nodes.Const) or isinstance(right, nodes.Const)
            if operand.op in ("in", "notin") or not has_constant:
                operand.expr = _filter(right, CHECK_TIME, node.lineno)
            left = right
        return node

    def visit_Call(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:  # *arguments
            node.dyn_args = _filter(node.dyn_args, COLLECT, node.lineno)
        return node

    visit_Filter = visit_Test = visit_Call

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, CHARGE, node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, CHARGE, node.lineno) if node.items else node

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, CHARGE, node.lineno) if node.items and node.ctx == "load" else node


def _filter(node: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


# ----------------------------------------------------------------------------------------------------------------------
# Jinja's filters and tests; each one refuses calls that would use too much.

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
        metered = {name: self._filter(name, filters.FILTERS[name]) for name in _FILTERS.split()}
        return metered | {"tojson": self._filter("tojson", self._to_json)}

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


# ----------------------------------------------------------------------------------------------------------------------
# The environment, in which all of this comes together.

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
        # A failed lookup would keep the argument, and print it after it has grown.
        if isinstance(argument, (list, tuple, dict, Namespace)):
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
        return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)

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
