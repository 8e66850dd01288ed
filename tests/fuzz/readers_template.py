"""The reader of chat templates among damaged templates and random expressions of everything that templates have."""

from __future__ import annotations

import random
from pathlib import Path

from dualtune.base.errors import DataError
from dualtune.data.chat.sandbox import _FILTERS
from dualtune.data.chat.template import ChatTemplate
from dualtune.data.sources.rows import RowError

TEMPLATES = Path(__file__).parents[1] / "golden" / "templates"
FILE = "chat_template.jinja"
MESSAGES = [
    {"role": "user", "content": "What is 2 + 2? é語 <b>"},
    {"role": "assistant", "content": "4", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None]}}}]},
]
NUMBERS = ("0", "1", "-1", "3", "60", "4000", "100000", "10**9", "10**99", "1.5", "1e308", "none", "true")
TEXTS = ("''", "'a'", "'%s'", "'{0}'", "'%1000d'", "'{:>999}'", "'a.a'", "'\"<&'", "'é語\\n'", "'role'", "'content'")
NAMES = ("messages", "messages[0]", "messages[0].content", "tools", "big", "many", "deep", "ns", "ns.x", "loop", "nope")
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or")
TESTS = ("defined", "odd", "even", "lower", "upper", "string", "iterable", "divisibleby", "in", "eq", "sameas", "lt")
METHODS = (
    "split", "rsplit", "strip", "replace", "join", "format", "format_map", "center", "zfill", "expandtabs", "upper",
    "title", "rfind", "count", "get", "items", "keys", "copy", "index", "splitlines", "partition", "__class__",
)  # fmt: skip
FILTERS = (*_FILTERS.split(), "tojson")
# What is large, deep, or in many places.
PRELUDE = (
    "{% set ns = namespace(x='') %}{% set many = [ns] * 4000 %}{% set big = 'aé' * 200000 %}{% set ns.x = big %}"
    "{% set ns.a = ns %}{% set deep = [[[[1] * 9] * 9] * 9] * 9 %}"
)


def template_seeds() -> list[dict[str, bytes]]:
    return [{FILE: path.read_bytes()} for path in sorted(TEMPLATES.glob("*.jinja"))]


def read_a_template(place: Path, out: Path, draw: random.Random) -> None:
    """Compiled and rendered: a text, or a refusal of template or row."""
    del out
    data = (place / FILE).read_bytes()
    try:
        compiled = ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>", "eos_token": "</s>"})
        text, spans = compiled.render_marked(MESSAGES, tools=[{"name": "f"}], add_generation_prompt=draw.random() < 0.5)
    except RowError as error:
        raise DataError(str(error)) from error
    assert all(0 <= start <= end <= len(text) for start, end in spans)


def forged_template(data: bytes, draw: random.Random) -> bytes:
    """New expressions: all of it, or at a place between two tags."""
    if draw.random() < 0.4:
        return (PRELUDE + template(draw)).encode()
    tags = data.split(b"{")
    at = draw.randrange(len(tags))
    tags[at] += template(draw).encode()
    return (PRELUDE.encode() if draw.random() < 0.7 else b"") + b"{".join(tags)


def template(draw: random.Random) -> str:
    return "".join(_statement(draw, draw.randrange(3)) for _ in range(draw.randint(1, 4)))


def _statement(draw: random.Random, depth: int) -> str:
    inner = _statement(draw, depth - 1) if depth else ""
    value = expression(draw, 3)
    return draw.choice((
        f"{{{{ {value} }}}}", f"{{{{ ({value}) | string | length }}}}", f"{{% set ns.x = {value} %}}{inner}",
        f"{{% for i in {value} %}}{inner}{{% endfor %}}", f"{{% for i in range(100000) if {value} %}}{{% endfor %}}",
        f"{{% if {value} %}}{inner}{{% endif %}}", f"{{% set v %}}{inner}{{% endset %}}{{{{ v ~ v }}}}",
        f"{{% macro f(a) %}}{inner}{{{{ f(a) if a is odd }}}}{{% endmacro %}}{{{{ f({value}) }}}}",
        f"{{% for i in range(100) %}}{{% set ns.x = ns.x {draw.choice(OPERATORS[:8])} {value} %}}{{% endfor %}}",
        f"{{% generation %}}{inner}{{% endgeneration %}}",
        f"{{% filter {draw.choice(FILTERS)} %}}{inner}{{% endfilter %}}",
    ))  # fmt: skip


def expression(draw: random.Random, depth: int) -> str:
    if not depth or draw.random() < 0.15:
        return draw.choice((draw.choice(NUMBERS), draw.choice(TEXTS), draw.choice(NAMES)))

    def part() -> str:
        return expression(draw, depth - 1)

    match draw.randrange(10):
        case 0 | 1:
            return f"({part()} {draw.choice(OPERATORS)} {part()})"
        case 2 | 3 | 4:
            named = draw.choice(("attribute=", "indent=", "width=", "default=", "reverse=", "precision=", "", ""))
            given = f"({named}{part()})" if draw.random() < 0.6 else ""
            return f"({part()} | {draw.choice(FILTERS)}{given})"
        case 5:
            test = f"{draw.choice(TESTS)}({part()})" if draw.random() < 0.7 else draw.choice(TESTS)
            return f"({part()} is {test})"
        case 6:
            return f"({part()} | {draw.choice(('map', 'select', 'reject', 'selectattr'))}({part()}, {part()}) | list)"
        case 7:
            return f"({part()}).{draw.choice(METHODS)}({', '.join(part() for _ in range(draw.randrange(3)))})"
        case 8:
            return draw.choice((f"[{part()}, {part()}]", f"{{'a': {part()}}}", f"dict(a={part()})", f"({part()},)"))
        case _:
            return draw.choice((f"({part()})[{part()}]", f"({part()})[{part()}:]", f"({part()})[::-1]", f"-{part()}"))
