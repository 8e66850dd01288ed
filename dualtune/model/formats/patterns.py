"""Regular expressions from foreign files, matched without backtracking.

Python's `re` tries one alternative after the other, and a pattern such as `(a+)+$` makes it try 2^n of them: a config
could block its reader for years. Here all alternatives are followed at once, as the set of text positions that they
have reached (Thompson 1968), so that the work is bounded by the sizes of pattern and text. `re` still parses. The
package `regex` has a timeout, but before that `a{1000000000}` takes all memory; RE2 does not support lookahead, which
real configs use.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, cast

from dualtune.base.errors import FormatError
from dualtune.base.fields import shown

# Python's internal parser of regular expressions: private, but these names have not changed since 3.11.
op, parser, compiler = (
    cast(Any, importlib.import_module(f"re._{name}")) for name in ("constants", "parser", "compiler")
)

MAX_PATTERN = 4096  # characters; Unsloth's longest has about 500
MAX_TEXT = 512  # of a module path
MAX_WORK = 200_000  # single steps of one match, a tenth of a second; normal patterns take up to 30,000
_NAME = re.compile(r"[\w\-.]{1,512}", re.ASCII)  # most patterns are plain names, which cannot be ambiguous

Node = tuple[Any, Any]  # operator and arguments, as the parser returns them
Positions = frozenset[int]


def full_match(pattern: str, text: str, where: object) -> bool:
    """Match like `re.fullmatch`. FormatError if the pattern is invalid or too costly."""
    if len(pattern) > MAX_PATTERN or len(text) > MAX_TEXT:
        raise FormatError(
            f"{where}: {shown(pattern)!r} for the module {shown(text)}: must be at most {MAX_PATTERN} characters "
            f"for a pattern, {MAX_TEXT} for a module path"
        )
    try:
        parsed = _parsed(pattern)
        return len(text) in _Match(pattern, parsed, text, where).sequence(parsed.nodes, frozenset([0]))
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(f"{where}: {shown(pattern)!r} is not a regular expression: {shown(str(error))}") from None


def matches_end(pattern: str, text: str, where: object) -> bool:
    """Return whether the pattern matches the path of a module, or its last components: PEFT's rule for module names."""
    full = rf"(.*\.)?({pattern})"
    if _NAME.fullmatch(pattern) and len(text) <= MAX_TEXT:
        return re.fullmatch(full, text) is not None
    return full_match(full, text, where)


class _Parsed:
    """A parsed pattern; its nodes that match at most one character are also compiled as separate expressions."""

    def __init__(self, pattern: str) -> None:
        self.nodes = parser.parse(pattern)
        self._singles: dict[int, re.Pattern[str]] = {}  # by id of the node, which lives as long as the pattern

    def single(self, node: Node) -> re.Pattern[str]:
        compiled = self._singles.get(id(node))
        if compiled is None:
            alone = parser.SubPattern(parser.State(), [node])
            compiled = self._singles[id(node)] = compiler.compile(alone, self.nodes.state.flags)
        return compiled


_parsed = lru_cache(maxsize=256)(_Parsed)


class _Match:
    """The match of one text, with a count of steps. Every method returns the positions where a node can end."""

    def __init__(self, pattern: str, parsed: _Parsed, text: str, where: object) -> None:
        self._pattern, self._parsed, self._text, self._where = pattern, parsed, text, where
        self._work = 0

    def sequence(self, nodes: Iterable[Node], positions: Positions) -> Positions:
        for node in nodes:
            positions = self._one(node, positions)
        return positions

    def _one(self, node: Node, positions: Positions) -> Positions:
        operator, arguments = node
        self._work += 1 + len(positions)
        if self._work > MAX_WORK:
            raise self._refusal("takes too long to match")
        if operator in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._single(node, positions, 1)
        if operator is op.BRANCH:
            return Positions().union(*(self.sequence(way, positions) for way in arguments[1]))
        if operator is op.SUBPATTERN and not arguments[1] and not arguments[2]:  # without local flags
            return self.sequence(arguments[3], positions)
        if operator in (op.MAX_REPEAT, op.MIN_REPEAT):  # greedy or not makes no difference: the whole text must match
            least, most, nodes = arguments
            return self._repeat(least, most, nodes, positions)
        if operator is op.AT:
            return self._single(node, positions, 0)
        if operator in (op.ASSERT, op.ASSERT_NOT) and arguments[0] > 0:  # lookahead
            must_match = operator is op.ASSERT
            return frozenset(p for p in positions if bool(self.sequence(arguments[1], frozenset([p]))) == must_match)
        raise self._refusal(f"uses {str(operator).lower()}, which is not supported here")

    def _repeat(self, least: int, most: Any, nodes: Any, positions: Positions) -> Positions:
        """Repeat between `least` and `most` times; only new positions are followed, so it ends when there are none."""
        for _ in range(least):
            before, positions = positions, self.sequence(nodes, positions)
            if positions == before:  # no further change
                break
        reached, new, times = positions, positions, least
        while new and (most is op.MAXREPEAT or times < most):
            new = self.sequence(nodes, new) - reached
            reached, times = reached | new, times + 1
        return reached

    def _single(self, node: Node, positions: Positions, length: int) -> Positions:
        """Match one character or, with length 0, a condition on a position, such as ^, $ and \\b: `re` decides."""
        single, size = self._parsed.single(node), len(self._text)
        return frozenset(p + length for p in positions if p + length <= size and single.match(self._text, p))

    def _refusal(self, reason: str) -> FormatError:
        return FormatError(f"{self._where}: the regular expression {shown(self._pattern)!r} {reason}")
