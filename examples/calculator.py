"""An environment for reinforcement learning: the model may ask a calculator before it answers.

    dualtune train configs/grpo_calculator.yaml

A row has a `prompt`, and in `answer` the number that is right. The model writes `<calc>12 * 34</calc>` to ask, and gets
what it is; anything else is its answer, and ends the conversation. docs/reinforcement_learning.md has the rules.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

ASKED = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
}
RIGHT, ASKING = 1.0, 0.1  # the rewards of a right answer, and of the first sum that can be calculated
TOOL = "You may write <calc>2 * 3</calc> to have it calculated. Then answer with the number alone."


class Calculator:
    """One conversation."""

    def reset(self, row: dict[str, Any]) -> str:
        self._answer, self._has_asked = float(row["answer"]), False
        return f"{row['prompt']}\n{TOOL}"

    def step(self, text: str) -> tuple[str, float, bool]:
        asked = ASKED.search(text)
        if asked is None:
            numbers = NUMBER.findall(text.replace(",", ""))
            return "", RIGHT * (bool(numbers) and abs(float(numbers[-1]) - self._answer) < 1e-6), True
        try:
            result = f"{calculated(asked[1]):g}"
        except (ValueError, ZeroDivisionError, OverflowError, SyntaxError, RecursionError) as error:
            return f"error: {error}", 0.0, False
        reward, self._has_asked = ASKING * (not self._has_asked), True
        return result, reward, False


def calculated(text: str) -> float:
    """Return the value of a sum: numbers, + - * / and brackets. ValueError for anything else."""
    return _value(ast.parse(text.strip()[:100], mode="eval").body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, + - * / and brackets")
