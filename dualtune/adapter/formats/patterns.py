"""Regular expressions from somebody else's file, matched without backtracking.

Python's `re` tries one way after the other, and a pattern such as `(a+)+$` makes it try 2^n of them: a config could
keep its reader busy for years. Here all ways are followed at once, as the set of places in the text that they have
reached (Thompson 1968), so that the work is bounded by the sizes of pattern and text. `re` still parses. The package
`regex` can stop after a time, but takes all memory before that for `a{1000000000}`; RE2 knows no lookahead, which real
configs have.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, cast

from dualtune.errors import FormatError
from dualtune.io.fields import shown

# Python's own parser of regular expressions: private, but these names are the same from 3.11 on.
op, parser, compiler = (
    cast(Any, importlib.import_module(f"re._{name}")) for name in ("constants", "parser", "compiler")
)

MAX_PATTERN = 4096  # characters; Unsloth's longest has about 500
MAX_TEXT = 512  # of a module path
MAX_WORK = 200_000  # single steps of one match, a tenth of a second; an honest one takes up to 30,000
_NAME = re.compile(r"[\w\-.]{1,512}", re.ASCII)  # what most patterns are, and nothing that matches in many ways

Node = tuple[Any, Any]  # operator and its arguments, as the parser has them
Places = frozenset[int]


def full_match(pattern: str, text: str, where: object) -> bool:
    """What `re.fullmatch` says. FormatError for what is no regular expression, and for what is too costly."""
    if len(pattern) > MAX_PATTERN or len(text) > MAX_TEXT:
        raise FormatError(
            f"{where}: {shown(pattern)!r} for the module {shown(text)}: a pattern may have {MAX_PATTERN} characters, "
            f"the path of a module {MAX_TEXT}"
        )
    try:
        parsed = _parsed(pattern)
        return len(text) in _Match(pattern, parsed, text, where).sequence(parsed.nodes, frozenset([0]))
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(f"{where}: {shown(pattern)!r} is not a regular expression: {shown(str(error))}") from None


def matches_end(pattern: str, text: str, where: object) -> bool:
    """Whether the pattern is the path of a module, or its last components: PEFT's rule for names of modules."""
    full = rf"(.*\.)?({pattern})"
    if _NAME.fullmatch(pattern) and len(text) <= MAX_TEXT:
        return re.fullmatch(full, text) is not None
    return full_match(full, text, where)


class _Parsed:
    """A pattern as nodes, and those of them that take one character or none as expressions of their own."""

    def __init__(self, pattern: str) -> None:
        self.nodes = parser.parse(pattern)
        self._singles: dict[int, re.Pattern[str]] = {}  # by id of the node, which lives as long as the pattern does

    def single(self, node: Node) -> re.Pattern[str]:
        found = self._singles.get(id(node))
        if found is None:
            alone = parser.SubPattern(parser.State(), [node])
            found = self._singles[id(node)] = compiler.compile(alone, self.nodes.state.flags)
        return found


_parsed = lru_cache(maxsize=256)(_Parsed)


class _Match:
    """One text, and the steps done so far. Every method gives the places where the node can end."""

    def __init__(self, pattern: str, parsed: _Parsed, text: str, where: object) -> None:
        self._pattern, self._parsed, self._text, self._where = pattern, parsed, text, where
        self._work = 0

    def sequence(self, nodes: Iterable[Node], places: Places) -> Places:
        for node in nodes:
            places = self._one(node, places)
        return places

    def _one(self, node: Node, places: Places) -> Places:
        operator, given = node
        self._work += 1 + len(places)
        if self._work > MAX_WORK:
            raise self._refusal("takes too long to match")
        if operator in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._single(node, places, 1)
        if operator is op.BRANCH:
            return Places().union(*(self.sequence(way, places) for way in given[1]))
        if operator is op.SUBPATTERN and not given[1] and not given[2]:  # without flags of its own
            return self.sequence(given[3], places)
        if operator in (op.MAX_REPEAT, op.MIN_REPEAT):  # greedy or not: the whole text is to be matched
            least, most, nodes = given
            return self._repeat(least, most, nodes, places)
        if operator is op.AT:
            return self._single(node, places, 0)
        if operator in (op.ASSERT, op.ASSERT_NOT) and given[0] > 0:  # what follows
            wanted = operator is op.ASSERT
            return frozenset(p for p in places if bool(self.sequence(given[1], frozenset([p]))) == wanted)
        raise self._refusal(f"uses {str(operator).lower()}, which is not supported here")

    def _repeat(self, least: int, most: Any, nodes: Any, places: Places) -> Places:
        """Between `least` and `most` times; new places only, so that it ends when there are none."""
        for _ in range(least):
            before, places = places, self.sequence(nodes, places)
            if places == before:  # as it will be from now on
                break
        reached, new, times = places, places, least
        while new and (most is op.MAXREPEAT or times < most):
            new = self.sequence(nodes, new) - reached
            reached, times = reached | new, times + 1
        return reached

    def _single(self, node: Node, places: Places, length: int) -> Places:
        """One character, or (length 0) a condition on a place, as ^, $ and \\b are: `re` says it."""
        single, size = self._parsed.single(node), len(self._text)
        return frozenset(p + length for p in places if p + length <= size and single.match(self._text, p))

    def _refusal(self, reason: str) -> FormatError:
        return FormatError(f"{self._where}: the regular expression {shown(self._pattern)!r} {reason}")
