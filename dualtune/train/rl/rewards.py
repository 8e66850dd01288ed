"""Rewards of answers: built-in ones, and Python functions of the user, which cannot end or stop a run.

A reward is a number for an answer, given the prompt and the answer of the data. What a user wrote runs in a process of
its own (`isolated.py`): one that raises or hangs costs the reward of its answer, and the run goes on.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.base.files import expanded
from dualtune.train.rl.isolated import Isolated, Named, imported, serve
from dualtune.train.rl.sql import SqlJudge

KEY = "rollouts.rewards"
OWN_NAMES = ("completion", "completions", "prompt", "prompts", "expected")  # what is no column of a row


class Reward(Protocol):
    """Returns the reward of a completion."""

    def __call__(self, completion: str, *, prompt: str, expected: str) -> float: ...


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """What a reward sees."""

    prompt: str  # the text before the answer, as the template writes it
    completion: str
    expected: str  # the answer of the data; empty where a row is a prompt alone
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what else a function may ask for, by name


# ----------------------------------------------------------------------------------------------------------------------
# Built-in rewards. Each is between 0 and 1.

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def exact(completion: str, *, prompt: str, expected: str) -> float:
    """Return 1 for the answer of the data, white space around it aside."""
    return float(completion.strip() == expected.strip())


def contains(completion: str, *, prompt: str, expected: str) -> float:
    """Return 1 for a text with the answer of the data in it."""
    return float(expected.strip() in completion)


def number(completion: str, *, prompt: str, expected: str) -> float:
    """Return 1 if the last number is that of the data's answer, as in GSM8K."""
    ours, theirs = (_last_number(text) for text in (completion, expected))
    return float(ours is not None and ours == theirs)


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def json_fields(completion: str, *, prompt: str, expected: str) -> float:
    """Return the share of the fields of both JSON objects that both have with the same value; 0 for another text."""
    try:
        ours, theirs = (json.loads(text) for text in (completion, expected))
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return float(ours == theirs)
    objects = cast("list[dict[str, Any]]", [ours, theirs])
    fields, absent = {*objects[0], *objects[1]}, object()
    return sum(objects[0].get(key, absent) == objects[1].get(key, absent) for key in fields) / max(1, len(fields))


def matches(pattern: str) -> Reward:
    """Return a reward of 1 for a text with a match of a regular expression."""
    compiled = re.compile(pattern, re.DOTALL)

    def reward(completion: str, *, prompt: str, expected: str) -> float:
        return float(compiled.search(completion) is not None)

    return reward


def brief(characters: str) -> Reward:
    """Return a reward of 1 for a text of at most so many characters, which falls as 1 / length beyond."""
    most = int(characters)

    def reward(completion: str, *, prompt: str, expected: str) -> float:
        return min(1.0, most / max(1, len(completion)))

    return reward


def same_rows(script: str) -> Reward:
    """Return a reward of 1 for a query that gives the rows of the expected one, on the database that a script makes."""
    judge = SqlJudge(expanded(script))
    judge.answer("SELECT 1")  # a script that is wrong is an error now

    def reward(completion: str, *, prompt: str, expected: str) -> float:
        return float(judge.score(expected, completion))

    return reward


BUILT_IN: Mapping[str, Reward] = {"exact": exact, "contains": contains, "number": number, "json": json_fields}
COMPARING = (*BUILT_IN, "sql")  # with the answer of the data
WITH_ARGUMENT: Mapping[str, Callable[[str], Reward]] = {"regex": matches, "brief": brief, "sql": same_rows}


def resolved(name: str) -> Reward:
    """Return the reward of a name: a built-in one, with its argument after a colon, or FILE.py:FUNCTION.

    Raises ConfigError for any other name, and for a file or function that is not there or cannot be imported.
    """
    kind, _, argument = name.partition(":")
    if name in BUILT_IN:
        return BUILT_IN[name]
    if kind in WITH_ARGUMENT:
        try:
            return WITH_ARGUMENT[kind](argument)
        except (ValueError, re.error, OSError, sqlite3.Error) as error:
            raise ConfigError(f"{KEY}: got '{name}': {error}") from error
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function:
        own = ", ".join([*BUILT_IN, "regex:PATTERN", "brief:CHARACTERS", "sql:SCRIPT"])
        raise ConfigError(f"{KEY}: got '{name}', allowed: {own}, or a Python function as FILE.py:FUNCTION")
    return UserReward(imported(KEY, expanded(file), function))


class UserReward:
    """A function of the user, which gets what it names of the answer and of the columns of its row.

    One that names `completions` gets lists, as TRL passes them, here of one answer, and returns a list.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = Named(function)

    @property
    def columns(self) -> list[str] | None:
        """The columns that it asks for; None: all."""
        return None if self._function.takes_all else [name for name in self._function.names if name not in OWN_NAMES]

    def __call__(self, completion: str, *, prompt: str, expected: str, **row: Any) -> Any:
        if "completions" not in self._function.names:
            return self._function(**{**row, "completion": completion, "prompt": prompt, "expected": expected})
        columns = {**row, "completions": completion, "prompts": prompt, "expected": expected}
        (value,) = self._function(**{name: [one] for name, one in columns.items()})
        return value


def short_name(name: str) -> str:
    """Return what metrics call a reward: the function of a file, or the name before the argument."""
    kind, _, rest = name.rpartition(":") if ".py:" in name else name.partition(":")
    return rest if kind.endswith(".py") else kind


# ----------------------------------------------------------------------------------------------------------------------
# The rewards of a run.


@dataclass(frozen=True, slots=True)
class JudgedAnswers:
    values_NR: np.ndarray  # float64, of each reward; NaN where it failed
    totals_N: np.ndarray  # float64: their weighted sum, NaN if one failed
    failures: tuple[str, ...]  # why, for people

    def beside(self, values_N: np.ndarray, failures: Sequence[str]) -> JudgedAnswers:
        """Return the same with another reward, whose weight is 1."""
        values_NR = np.column_stack([self.values_NR, values_N])
        return JudgedAnswers(values_NR, self.totals_N + values_N, (*self.failures, *failures))

    @classmethod
    def read(cls, record: dict[str, Any]) -> JudgedAnswers:
        """Return those of another process, from their fields."""
        return cls(record["values_NR"], record["totals_N"], tuple(record["failures"]))

    @classmethod
    def joined(cls, parts: Sequence[JudgedAnswers], order: Sequence[int]) -> JudgedAnswers:
        """Return those of parts, one after another, in this order."""
        return cls(
            np.concatenate([part.values_NR for part in parts])[order],
            np.concatenate([part.totals_N for part in parts])[order],
            tuple(failure for part in parts for failure in part.failures),
        )


class Rewards:
    """The rewards that a config names, each with its weight. Close it: it may have processes."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], timeout_s: float) -> None:
        """Raise ConfigError for a reward that is not there. `timeout_s`: that a user's function may take."""
        self.names, self._weights_R = tuple(names), np.array(weights or [1.0] * len(names))
        self._score = [
            IsolatedReward(name, timeout_s) if _is_of_user(name) else _direct(resolved(name)) for name in names
        ]

    @property
    def comparing(self) -> list[str]:
        """Those that compare with the answer of the data."""
        return [name for name in self.names if name.partition(":")[0] in COMPARING]

    @property
    def ask_for_rows(self) -> bool:
        """Whether a function asks for columns of the data."""
        return any(score.asks_for_row for score in self._score if isinstance(score, IsolatedReward))

    def judge(self, answers: Sequence[JudgedAnswer]) -> JudgedAnswers:
        values_NR, failures = np.full((len(answers), len(self.names)), math.nan), list[str]()
        for n, answer in enumerate(answers):
            for r, (name, score) in enumerate(zip(self.names, self._score, strict=True)):
                value = score(answer)
                if isinstance(value, str):
                    failures.append(f"{name}: {value}")
                else:
                    values_NR[n, r] = value
        return JudgedAnswers(values_NR, values_NR @ self._weights_R, tuple(failures))

    def close(self) -> None:
        for score in self._score:
            if isinstance(score, IsolatedReward):
                score.close()


def _is_of_user(name: str) -> bool:
    """Return whether a reward may hang or fail: a function of the user, a pattern, or a query of the model."""
    return name.partition(":")[0] not in (*BUILT_IN, "brief")


def _direct(reward: Reward) -> Callable[[JudgedAnswer], float | str]:
    return lambda answer: reward(answer.completion, prompt=answer.prompt, expected=answer.expected)


class IsolatedReward(Isolated):
    """A reward in a process of its own. `about` says which columns of a row its function asks for: null for all."""

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__(KEY, "dualtune.train.rl.rewards", name, timeout_s)

    @property
    def asks_for_row(self) -> bool:
        return self.about["columns"] is None or bool(self.about["columns"])

    def __call__(self, answer: JudgedAnswer) -> float | str:
        """Return the reward, or why there is none."""
        columns = answer.row if self.about["columns"] is None else self.about["columns"]
        row = {name: answer.row[name] for name in columns if name in answer.row}
        own = {"completion": answer.completion, "prompt": answer.prompt, "expected": answer.expected}
        reply = self.ask({**row, **own})
        return reply if isinstance(reply, str) else reply["reward"]


def _served(name: str) -> tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
    """Return which columns the reward of a name asks for, and what answers a request."""
    reward: Any = resolved(name)

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        value = float(reward(**request))
        if not math.isfinite(value):
            raise ValueError(f"returned {value}")
        return {"reward": value}

    return {"columns": reward.columns if isinstance(reward, UserReward) else []}, answer


if __name__ == "__main__":
    serve(lambda: _served(sys.argv[1]))
