"""Jinja for templates that nobody has read: a chat template comes with a model, and a model comes from anywhere.

Jinja's sandbox keeps a template away from Python's internals, but lets it loop for years and fill the memory. Here
every step that can take long or grow is metered: the parsed template is rewritten so that loops, literals, `~`, `[:]`
and comparisons report to the meter, and calls, operators, filters and outputs report by Jinja's own hooks. What can
grow at once (`'a' * n`, `replace`, `join`, padding, …) is computed on paper first. Text and lists that a template makes
are charged and never paid back, so what it holds is bounded too. Two rules carry the rest: no container is larger than
the limit, counting a thing once for each place that it is in, and no step without a report can take more than a walk
through one such container.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import getsizeof
from typing import Any, cast

from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from dualtune.data.template_meter import BYTES_PER_PIECE, MAX_INT_BITS, Meter, TemplateLimit

MAX_FORMAT = 1 << 14  # characters of a format; the pattern below is quadratic

# Names that no template can spell.
_TICK, _MADE, _CONCAT, _COLLECT = "<tick>", "<made>", "<concat>", "<collect>"
_WIDE = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")
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
# Jinja's own things, whose attributes its sandbox knows.
_RUNTIME = (LoopContext, Macro, Namespace, Cycler, Joiner, TemplateReference, BlockReference, Undefined)
_FILTERS = (
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int items join last "
    "length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string title "
    "trim truncate unique upper"
)
# They make a text of whatever they are given.
_OF_TEXT = (
    "capitalize", "e", "escape", "format", "indent", "lower", "replace", "string", "title", "trim", "truncate", "upper",
)  # fmt: skip
_REFUSED = (nodes.EvalContextModifier, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class _Instrument(NodeTransformer):
    """Rewrites a parsed template so that it reports to the meter. Nothing else about it changes."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED):
            name = "autoescape" if isinstance(node, nodes.EvalContextModifier) else type(node).__name__.lower()
            raise TemplateSyntaxError(f"{name} is not available to chat templates", node.lineno)
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = _filter(nodes.Const(None), _TICK, node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # template data bypasses `finalize`, constants do not

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load"), _CONCAT, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        with_constant = isinstance(node.expr, nodes.Const) or all(isinstance(x.expr, nodes.Const) for x in node.ops)
        cheap = with_constant and not any(x.op in ("in", "notin") for x in node.ops)
        return node if cheap else _filter(node, _MADE, node.lineno)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        self._visit_star(node)
        return _filter(node, _MADE, node.lineno) if node.args or node.name in ("lower", "upper") else node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        self._visit_star(node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        self._visit_star(node)
        return node

    def _visit_star(self, node: nodes.Call | nodes.Filter | nodes.Test) -> None:
        if node.dyn_args is not None:
            node.dyn_args = _filter(node.dyn_args, _COLLECT, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _MADE, node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _MADE, node.lineno) if node.items else node

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _MADE, node.lineno) if node.items and node.ctx == "load" else node


def _filter(node: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        cast(Sandbox, self.environment).marks_turns = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.EnvironmentAttribute("mark_turn"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body, lineno=lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one template, which it renders once at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        self.meter = Meter()
        self.marks_turns = False  # the template has generation markers
        self.written = 0  # characters of the output so far, for
        self.turns: list[tuple[int, str]] = []  # where the generation blocks start, and what they hold
        # Not optimized: nothing may be computed while the template is compiled.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._output,
            extensions=[_Generation, loopcontrols],
        )  # fmt: skip
        limited: dict[str, Callable[..., Any]] = {
            name: self._limited(name, filters.FILTERS[name]) for name in _FILTERS.split()
        }
        limited["tojson"] = self._limited("tojson", self._to_json)
        self.filters = limited | {
            _TICK: self.meter.tick,
            _MADE: self.meter.made,
            _CONCAT: self._concat,
            _COLLECT: self._collected,
        }
        self.globals = {
            "range": self.globals["range"], "dict": _new_dict, "namespace": _Namespace, "cycler": Cycler,
            "joiner": Joiner, "raise_exception": self._raise_exception,
        }  # fmt: skip

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument().visit(source), *args, **kwargs)

    def mark_turn(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.turns.append((self.written, text))
        return text

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(
            argument, (list, tuple, dict, Namespace)
        ):  # a miss would remember it, and show it when it has grown
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
        formatter = _Formatter(self, self.meter)
        if value.__name__ == "format_map":
            return functools.partial(formatter.vformat, text, ())
        return formatter.of(text)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.meter.look()
        text = getattr(obj, "__self__", None)
        of_text = isinstance(text, str)
        self._before_any(args)
        if of_text:
            args = self._before_method(text, obj.__name__, args, kwargs)
        return self.meter.made(super().call(context, obj, *args, **kwargs), deeply=of_text)

    def _before_method(self, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Refuse a method of a string that would take too much; the arguments to call it with."""
        room = self.meter.room
        if name == "join" and args:
            args = (self._collected(args[0]),)
            self._before_join(text, args[0])
        elif name in ("center", "ljust", "rjust", "zfill") and args:
            room(4 * args[0])
        elif name == "expandtabs":
            room(4 * text.count("\t") * (args[0] if args else kwargs.get("tabsize", 8)))
        elif name == "replace":
            self._before_replace(text, *args[:2])
        elif name in ("split", "rsplit", "splitlines"):
            separator = args[0] if args else kwargs.get("sep")
            pieces = text.count(separator) if separator and isinstance(separator, str) else len(text) // 2
            room(getsizeof(text) + BYTES_PER_PIECE * pieces)
        if name in ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"):
            for arg in args[:1]:
                self.meter.product(len(text), len(arg or ""))
        return args

    def _before_replace(self, text: str, old: Any = "", new: Any = "") -> None:
        self.meter.room(text.count(str(old)) * self._text_bytes(new))

    def _before_join(self, separator: Any, items: Sequence[Any]) -> None:
        self.meter.room(sum(map(self._text_bytes, items)) + self._text_bytes(separator) * len(items))

    def _collected(self, items: Any) -> list[Any]:
        if isinstance(items, str):
            self.meter.spend(BYTES_PER_PIECE * len(items))
        return [*items]

    def _text_bytes(self, value: Any) -> int:
        """At most so many bytes has `str(value)`. What is no text is written with escapes."""
        return getsizeof(value) if isinstance(value, str) else 4 * self.meter.size(value)

    def _before_any(self, arguments: Iterable[Any]) -> None:
        """Whatever is called may write an argument as text, if only into an error message."""
        for value in arguments:
            if not (value is None or isinstance(value, (str, int))):
                self.meter.room(self._text_bytes(value))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._before_format(left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str):
                    self.meter.room(times * (getsizeof(value) - getsizeof("")))
                elif isinstance(times, int) and isinstance(value, (list, tuple)):
                    self.meter.room(times * self.meter.size(cast(Any, value)))
        elif (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > MAX_INT_BITS
        ):
            raise TemplateLimit(f"a number of more than {MAX_INT_BITS} bits")
        return self.meter.made(super().call_binop(context, operator, left, right))

    def _before_format(self, text: str, values: Any) -> None:
        if len(text) > MAX_FORMAT or _WIDE.search(text):
            raise TemplateLimit("a format string that is too long, or asks for a field that is too wide")
        self.meter.room(text.count("%") * 4 * self.meter.size(values))

    @pass_eval_context  # says to the compiler that it cannot be called early
    def _output(self, context: Any, value: Any) -> Any:
        self.meter.spend(self._text_bytes(value))
        return value

    def _concat(self, parts: tuple[Any, ...]) -> str:
        self.meter.spend(sum(map(self._text_bytes, parts)))
        return "".join(map(str, parts))

    def _to_json(
        self, x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """JSON as transformers writes it: Jinja's own filter escapes for HTML."""
        for option in (indent, *(separators or ())):
            if option is not None and (len(option) if isinstance(option, str) else option) > 100:
                raise TemplateLimit("tojson with an indent or separators of more than 100 characters")
        self.meter.room(6 * self.meter.size(x))
        options: dict[str, Any] = {
            "ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys,
        }  # fmt: skip
        if indent is None:
            return json.dumps(x, **options)
        pieces: list[str] = []  # one by one, for a deep value is indented far
        for piece in json.JSONEncoder(**options).iterencode(x):
            self.meter.spend(getsizeof(piece))
            pieces.append(piece)
        return "".join(pieces)

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(str(message))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that refuses what would take too much, and whose result is charged."""
        hidden = hasattr(function, "jinja_pass_arg")  # Jinja hands its own thing in as the first argument

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.meter.look()
            before, (value, *rest) = args[:hidden], args[hidden:]
            value = self._before_filter(name, value, rest, kwargs)
            return self.meter.made(function(*before, value, *rest, **kwargs))

        return run

    def _before_filter(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Refuse a filter that would take too much; the value to call it with."""
        meter = self.meter
        self._before_any(args)
        self._before_any(kwargs.values())
        if name in _OF_TEXT:
            pieces = len(value) if isinstance(value, str) and name in ("indent", "title") else 0
            meter.room(self._text_bytes(value) + BYTES_PER_PIECE // 2 * pieces)
        elif name in ("list", "sort", "groupby"):
            value = self._collected(value)
        if name == "trim":
            meter.product(len(str(value)), len(args[0] if args else kwargs.get("chars", "") or ""))
        elif name == "join":
            value = self._collected(value)
            self._before_join(args[0] if args else kwargs.get("d", ""), value)
        elif name == "format":
            self._before_format(str(value), (*args, kwargs))
        elif name == "replace":
            self._before_replace(str(value), *[*args, *(kwargs[key] for key in ("old", "new") if key in kwargs)][:2])
        elif name == "indent":
            width = args[0] if args else kwargs.get("width", 4)
            lines = len(str(value).splitlines()) + 1
            meter.room(4 * lines * (len(width) if isinstance(width, str) else width))
        elif name == "round" and abs(args[0] if args else kwargs.get("precision", 0)) > 100:
            raise TemplateLimit("round to more than 100 digits")
        return value


class _Formatter(SandboxedFormatter):
    """`str.format` with each field charged before it is made."""

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
            raise TemplateLimit("a format string that asks for a field that is too wide")
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
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name}")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
