"""An environment of the package verifiers 0.1 to 0.3: a model that may call a calculator before it answers.

    pip install 'dualtune[verifiers]' 'verifiers<0.4'
    dualtune data environment configs/grpo_verifiers.yaml     # writes data/products.jsonl
    dualtune train configs/grpo_verifiers.yaml

It is in the form that every environment of that package has, so other trainers run it too.
docs/reinforcement_learning.md says how dualtune does.
"""

from __future__ import annotations

import random
import re
from typing import Any

NUMBER = re.compile(r"-?\d+")


def calculate(a: int, operator: str, b: int) -> int:
    """Calculate a sum, a difference or a product.

    Args:
        a: The first number.
        operator: One of +, - and *.
        b: The second number.
    """
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def products(size: int, seed: int) -> list[dict[str, str]]:
    """Return questions with their answers."""
    numbers = random.Random(seed)
    pairs = [(numbers.randint(10, 99), numbers.randint(10, 99)) for _ in range(size)]
    return [{"question": f"What is {a} * {b}?", "answer": str(a * b)} for a, b in pairs]


def right(completion: list[Any], answer: str, **_: Any) -> float:
    """1 if the last number of the last message is the answer."""
    last = completion[-1] if completion else {"content": ""}
    text = last["content"] if isinstance(last, dict) else last.content
    return float(NUMBER.findall((text or "").replace(",", ""))[-1:] == [answer])


def load_environment(size: int = 1000, seed: int = 0) -> Any:
    """Return the environment; the arguments are those of rollouts.environment_args."""
    import verifiers as vf
    from datasets import Dataset

    return vf.ToolEnv(
        dataset=Dataset.from_list(products(size, seed)),
        eval_dataset=Dataset.from_list(products(64, seed + 1)),
        rubric=vf.Rubric(funcs=[right]),
        tools=[calculate],
        max_turns=4,
    )
