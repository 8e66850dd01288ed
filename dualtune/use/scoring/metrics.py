"""Metrics of a generated answer: a function of the expected text and the answer, true or false, or a number.

An answer pattern scores the last match. The strict score uses only the pattern, as in the GSM8K paper (Cobbe et al.,
arXiv 2110.14168: "#### 42" ends an answer). For numbers, the lenient score uses the last number if there is no match.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, cast

import numpy as np

from dualtune.base.errors import ConfigError, DataError, FormatError
from dualtune.base.plugins import points_of
from dualtune.base.untrusted import parse_object

TASKS = {"gsm8k": r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)"}
METRICS_GROUP = "dualtune.metrics"
RIGHT, LENIENT = "right", "right_lenient"
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")

Score = bool | float
Scorer = Callable[[str, str], Score]  # of the expected text and the answer; DataError if the row cannot be scored


@dataclass(frozen=True, slots=True)
class Metric:
    """A named metric."""

    name: str
    scorer: Scorer
    is_own: bool = False  # a function of the user's, which may be slow or count its calls

    def score(self, where: str, expected: str, got: str) -> Score:
        """Return the score of an answer. DataError, which names the row, if it cannot be scored."""
        try:
            return self.scorer(expected, got)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error.__cause__

    def check(self, where: str, expected: str) -> None:
        """Raise DataError if an expected text cannot be scored, before there are answers."""
        if not self.is_own:
            self.score(where, expected, "")


def is_right(scores: Sequence[Score]) -> bool | None:
    """Return whether all metrics that say true or false say true; None if there is none."""
    verdicts = [score for score in scores if isinstance(score, bool)]
    return all(verdicts) if verdicts else None


# --- a pattern --------------------------------------------------------------------------------------------------------


def pattern_metrics(pattern: re.Pattern[str]) -> list[Metric]:
    """Return the strict and the lenient score of the last match of a pattern."""

    def strict(expected: str, got: str) -> bool:
        answer, target = last_match(pattern, got), _target(pattern, expected)
        return answer is not None and _same(answer, target)

    def lenient(expected: str, got: str) -> bool:
        answer, target = last_match(pattern, got), _target(pattern, expected)
        return _same(last_match(_NUMBER, got) or "" if answer is None else answer, target)

    return [Metric(RIGHT, strict), Metric(LENIENT, lenient)]


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match: its first group, or all of it if there is none."""
    matches = list(pattern.finditer(text))
    return matches[-1][1 if pattern.groups else 0] if matches else None


def _target(pattern: re.Pattern[str], expected: str) -> str:
    match = last_match(pattern, expected)
    if match is None:
        raise DataError(f"the expected answer does not match the pattern {pattern.pattern!r}")
    return match


def _same(got: str, expected: str) -> bool:
    a, b = _number(got), _number(expected)
    return a == b if a is not None and b is not None else got.strip() == expected.strip()


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return None


# --- a field of a JSON object -----------------------------------------------------------------------------------------


def json_metric(name: str) -> Metric:
    """Return whether a field of the JSON object in the answer equals that of the expected text.

    The object is what lies between the first and the last brace, so text and code marks around it do no harm. A dot
    separates nested fields. Numbers are compared as numbers, all else in type and value.
    """
    path = name.split(".")

    def same(expected: str, got: str) -> bool:
        try:
            target = _field(expected, path)
        except FormatError as error:
            raise DataError(f"the expected answer: {error}") from None
        try:
            return _equal(_field(got, path), target)
        except FormatError:
            return False

    return Metric(f"json:{name}", same)


def _field(text: str, path: Sequence[str]) -> Any:
    """Return a field of the object in a text. FormatError if there is no object, or it lacks the field."""
    start, end = text.find("{"), text.rfind("}") + 1
    value: Any = parse_object(text[start:end].encode(errors="replace") if 0 <= start < end else b"", "JSON object")
    for key in path:
        if not isinstance(value, dict) or key not in value:
            raise FormatError(f"JSON object: there is no field {'.'.join(path)!r}")
        value = value[key]  # pyright: ignore[reportUnknownVariableType]
    return value  # pyright: ignore[reportUnknownVariableType]


def _equal(a: Any, b: Any) -> bool:
    are_numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return a == b and (are_numbers or type(a) is type(b))


# --- a metric of the user's -------------------------------------------------------------------------------------------


def user_metric(name: str) -> Metric:
    """Load a metric: an entry point of the group `dualtune.metrics` by its name, or `module:function`.

    The function gets the expected text and the answer, and returns a number or a bool. A module may lie in the current
    directory; an installed one of the same name comes first. ConfigError if it cannot be loaded.
    """
    function = _loaded(name)

    def score(expected: str, got: str) -> Score:
        try:
            result: Any = function(expected, got)
        except Exception as error:  # foreign code
            raise DataError(f"the metric {name} raised {type(error).__name__}: {_first_line(error)}") from error
        plain = cast(Any, result.item() if isinstance(result, np.generic) else result)  # pyright: ignore
        if isinstance(plain, bool):
            return plain
        if not isinstance(plain, int | float) or not math.isfinite(plain):
            raise DataError(f"the metric {name} returned {str(plain)[:100]!r}, it must be a finite number or a bool")
        return float(plain)

    return Metric(name, score, is_own=True)


def _loaded(name: str) -> Callable[[str, str], Any]:
    points = {point.name: point for point in points_of(METRICS_GROUP)}
    module, _, function = name.partition(":")
    try:
        if name in points:
            metric = points[name].load()
        elif module and function:
            metric = getattr(_imported(module), function)
        else:
            installed = ", ".join(points) or "none is installed"
            allowed = f"an entry point of the group {METRICS_GROUP} ({installed}) or module:function"
            raise ConfigError(f"--metric: got {name!r}, allowed: {allowed}")
    except ConfigError:
        raise
    except Exception as error:  # foreign code
        raise ConfigError(f"--metric {name}: {type(error).__name__}: {_first_line(error)}") from error
    if not callable(metric):
        raise ConfigError(f"--metric {name}: got a {type(metric).__name__}, it must be a function")
    return metric


def _imported(module: str) -> Any:
    directory = os.getcwd()  # noqa: PTH109
    sys.path.append(directory)
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(directory)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
