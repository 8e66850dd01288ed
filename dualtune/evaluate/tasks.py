"""Score generated answers: the last match of a pattern is compared with the expected answer's.

The strict score uses only the pattern, as in the GSM8K paper (Cobbe et al., arXiv 2110.14168: "#### 42" ends an
answer). For numbers, the lenient score uses the last number if the pattern is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from dualtune.data.chat.formats import Example
from dualtune.errors import DataError
from dualtune.evaluate.inference import LoadedModel, answer

TASKS = {"gsm8k": r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)"}
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Answers:
    """The number of right answers."""

    num_rows: int
    num_right: int
    num_right_lenient: int


def check_answers(
    model: LoadedModel, examples: Sequence[Example], pattern: re.Pattern[str], *, max_tokens: int,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:  # fmt: skip
    """Generate greedily and compare. DataError if a row's expected answer does not match the pattern."""
    right = lenient = 0
    for done, example in enumerate(examples, start=1):
        generated = answer(model, example, max_tokens)
        expected = last_match(pattern, generated.expected)
        if expected is None:
            raise DataError(f"{example.where}: the expected answer does not match the pattern {pattern.pattern!r}")
        got = last_match(pattern, generated.got)
        right += got is not None and _same(got, expected)
        lenient += _same(last_match(_NUMBER, generated.got) or "" if got is None else got, expected)
        show(done, len(examples))
    return Answers(len(examples), right, lenient)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match: its first group, or all of it if there is none."""
    matches = list(pattern.finditer(text))
    return matches[-1][1 if pattern.groups else 0] if matches else None


def _same(got: str, expected: str) -> bool:
    a, b = _number(got), _number(expected)
    return a == b if a is not None and b is not None else got.strip() == expected.strip()


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return None
