"""Rewards of answers: built-in ones, and Python functions of the user, which cannot end or stop a run.

A reward is a number for an answer, given the prompt and the answer of the data. What a user wrote runs in a process of
its own (`isolated.py`): one that raises or hangs costs the reward of its answer, and the run goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.base.files import expanded
from dualtune.train.rl.isolated import Isolated, Named, check_defined, imported, serve
from dualtune.train.rl.sql import SqlJudge

KEY = "rollouts.rewards"
OWN_LISTS = ("prompt", "completion")  # columns that TRL passes as lists of their own, by the plural


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
    prompt_messages: Sequence[Mapping[str, Any]] | None = None  # before the answer, if the row has messages


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
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


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
    if most < 1:
        raise ValueError("allowed: a number of characters >= 1")

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


def resolved(name: str) -> Reward | UserReward:
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
    return UserReward(name, imported(KEY, *_file_and_function(name)))


def check_unrun(name: str) -> None:
    """Raise ConfigError as `resolved`, as far as can be said without running a file of the user."""
    kind, _, argument = name.partition(":")
    if kind == "sql":
        if not expanded(argument).is_file():
            raise ConfigError(f"{KEY}: got '{name}': {argument} is not a file. Write the path of an SQL script")
    elif name in BUILT_IN or kind in WITH_ARGUMENT:
        resolved(name)
    else:
        check_defined(KEY, *_file_and_function(name))


def _file_and_function(name: str) -> tuple[Path, str]:
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function:
        own = ", ".join([*BUILT_IN, "regex:PATTERN", "brief:CHARACTERS", "sql:SCRIPT"])
        raise ConfigError(f"{KEY}: got '{name}', allowed: {own}, or a Python function as FILE.py:FUNCTION")
    return expanded(file), function


class UserReward:
    """A function of the user, which gets what it names of the answer and of the columns of its row.

    One that names `completions` gets lists, as TRL passes them, here of one answer, and returns a list. As there, an
    answer to messages is a list of messages. A coroutine is awaited. None means no reward: the answer is not judged.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Raise ConfigError for what cannot be called with names, or makes an object in place of a number."""
        if inspect.isclass(function):
            called = name.rpartition(":")[2]
            rule = f"is a class; allowed: a function, or an object of it: add judge = {called}() to the file, and name"
            raise ConfigError(f"{KEY}: {name} {rule} judge")
        self._function = Named(function)
        if unnamed := self._function.positional_only:
            rule = "rewards are called with names; remove the / from its parameters"
            raise ConfigError(f"{KEY}: {name} takes {', '.join(unnamed)} by position alone, but {rule}")

    @property
    def takes_lists(self) -> bool:
        return "completions" in self._function.names

    @property
    def columns(self) -> list[str] | None:
        """The columns that it asks for; None: all."""
        return None if self._function.takes_all else self._columns(self._function.names)

    @property
    def required(self) -> list[str]:
        """The columns without which it cannot be called."""
        return self._columns(self._function.required)

    def _columns(self, names: Sequence[str]) -> list[str]:
        own = ("completions", "prompts", "expected") if self.takes_lists else ("completion", "prompt", "expected")
        return [name for name in names if name not in own]

    def __call__(self, answer: JudgedAnswer) -> float | None:
        """Return the reward. Raises TypeError and ValueError for anything but a finite number and None."""
        row = {**dict.fromkeys(self.required), **answer.row}  # a field that a row leaves out is null, as in a table
        if not self.takes_lists:
            own = {"completion": answer.completion, "prompt": answer.prompt, "expected": answer.expected}
            return _number_of(_awaited(self._function(**{**row, **own})))
        prompt, completion = answer.prompt, answer.completion
        if answer.prompt_messages is not None:
            prompt, completion = answer.prompt_messages, [{"role": "assistant", "content": completion}]
        row = {name: value for name, value in row.items() if name not in OWN_LISTS or name in self._function.names}
        columns = {**row, "completions": completion, "prompts": prompt, "expected": answer.expected}
        values = _awaited(self._function(**{name: [one] for name, one in columns.items()}))
        try:
            values = list(values)
        except TypeError:
            raise TypeError(f"returned {_shown(values)}; one that names completions returns a list") from None
        if len(values) != 1:
            raise ValueError(f"returned {len(values)} rewards for 1 completion")
        return _number_of(values[0])


def _awaited(value: Any) -> Any:
    async def result() -> Any:
        return await value

    return asyncio.run(result()) if inspect.isawaitable(value) else value


def _number_of(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes | list | tuple | dict):
        raise TypeError(f"returned {_shown(value)}, allowed: a number, or None for an answer that it does not judge")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"returned {number}, allowed: a finite number, or None for an answer that it does not judge")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def short_names(names: Sequence[str]) -> list[str]:
    """Return what metrics call rewards: the function of a file, or the name before the argument.

    Those that have that in common are numbered, such as regex_1 and regex_2.
    """
    short = list[str]()
    for name in names:
        kind, _, rest = name.rpartition(":") if ".py:" in name else name.partition(":")
        short.append(rest if kind.endswith(".py") else kind)
    counts, seen = Counter(short), Counter[str]()
    for place, name in enumerate(short):
        if counts[name] > 1:
            seen[name] += 1
            short[place] = f"{name}_{seen[name]}"
    return short


# ----------------------------------------------------------------------------------------------------------------------
# The rewards of a run.


@dataclass(frozen=True, slots=True)
class JudgedAnswers:
    """The rewards of N answers, R of each."""

    values_NR: np.ndarray  # float64, of each reward; NaN where it failed, or does not judge the answer
    failed_N: np.ndarray  # bool: whether one failed
    weights_R: np.ndarray
    failures: tuple[str, ...]  # why, for people

    @property
    def totals_N(self) -> np.ndarray:
        """The weighted sum of those that judge an answer, float64; NaN if one failed, or none does."""
        totals_N = np.nan_to_num(self.values_NR) @ self.weights_R
        return np.where(self.failed_N | np.isnan(self.values_NR).all(1), math.nan, totals_N)

    def beside(self, values_N: np.ndarray, failures: Sequence[str]) -> JudgedAnswers:
        """Return the same with another reward, whose weight is 1. It fails where it is NaN."""
        values_NR = np.column_stack([self.values_NR, values_N])
        failed_N, weights_R = self.failed_N | np.isnan(values_N), np.append(self.weights_R, 1.0)
        return JudgedAnswers(values_NR, failed_N, weights_R, (*self.failures, *failures))

    @classmethod
    def read(cls, record: dict[str, Any]) -> JudgedAnswers:
        """Return the judged answers of another process, from their fields."""
        return cls(record["values_NR"], record["failed_N"], record["weights_R"], tuple(record["failures"]))

    @classmethod
    def joined(cls, parts: Sequence[JudgedAnswers], order: Sequence[int]) -> JudgedAnswers:
        """Return the answers of all parts, in this order."""
        return cls(
            np.concatenate([part.values_NR for part in parts])[order],
            np.concatenate([part.failed_N for part in parts])[order],
            parts[0].weights_R,
            tuple(failure for part in parts for failure in part.failures),
        )

    def failure_texts(self) -> list[str]:
        """Return why rewards failed, each reason once."""
        every = len(self.values_NR)
        return [
            f"{why} ({count} of {every} answers)" if every > 1 else why for why, count in Counter(self.failures).items()
        ]


class Rewards:
    """The rewards that a config names, each with its weight. Close it: it may have processes."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], timeout_s: float) -> None:
        """Raise ConfigError for a reward that is not there. `timeout_s`: that a user's function may take."""
        self.names, self._weights_R = tuple(names), np.array(weights or [1.0] * len(names))
        self._score: list[IsolatedReward | Callable[[JudgedAnswer], float]] = [
            IsolatedReward(name, timeout_s) if _is_of_user(name) else _direct(cast(Reward, resolved(name)))
            for name in names
        ]

    @property
    def comparing(self) -> list[str]:
        """Those that compare with the answer of the data."""
        return [name for name in self.names if name.partition(":")[0] in COMPARING]

    @property
    def ask_for_rows(self) -> bool:
        """Whether a function asks for columns of the data."""
        return any(score.asks_for_row for score in self._score if isinstance(score, IsolatedReward))

    @property
    def ask_for_messages(self) -> bool:
        """Whether a function has TRL's form, in which an answer to messages is a list of messages."""
        return any(score.about["takes_lists"] for score in self._score if isinstance(score, IsolatedReward))

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise ConfigError if a function needs what is neither one of `columns` nor anything else that it gets."""
        for name, score in zip(self.names, self._score, strict=True):
            needed = score.about["required"] if isinstance(score, IsolatedReward) else ()
            if missing := [each for each in needed if each not in columns]:
                lists = isinstance(score, IsolatedReward) and score.about["takes_lists"]
                own = "completions, prompts" if lists else "completion, prompt"
                raise ConfigError(
                    f"{KEY}: {name} needs {', '.join(missing)}, which no row has; allowed: {own}, expected, and the "
                    f"columns of the data: {', '.join(columns)}. Rename the parameter, or give it a default"
                )

    def judge(self, answers: Sequence[JudgedAnswer]) -> JudgedAnswers:
        values_NR, failures = np.full((len(answers), len(self.names)), math.nan), list[str]()
        failed_N = np.zeros(len(answers), bool)
        for n, answer in enumerate(answers):
            for r, (name, score) in enumerate(zip(self.names, self._score, strict=True)):
                value = score(answer)
                if isinstance(value, str):
                    failures.append(f"{name}: {value}")
                    failed_N[n] = True
                elif value is not None:
                    values_NR[n, r] = value
        return JudgedAnswers(values_NR, failed_N, self._weights_R, tuple(failures))

    def close(self) -> None:
        for score in self._score:
            if isinstance(score, IsolatedReward):
                score.close()


def _is_of_user(name: str) -> bool:
    """Return whether a reward may hang or fail: a function of the user, a pattern, or a query of the model."""
    return name.partition(":")[0] not in (*BUILT_IN, "brief")


def _direct(reward: Reward) -> Callable[[JudgedAnswer], float]:
    return lambda answer: reward(answer.completion, prompt=answer.prompt, expected=answer.expected)


class IsolatedReward(Isolated):
    """A reward in a process of its own. `about` says which columns of a row its function asks for (null for all), which
    it cannot do without, and whether it takes lists.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__(KEY, "dualtune.train.rl.rewards", name, timeout_s)

    @property
    def asks_for_row(self) -> bool:
        return self.about["columns"] is None or bool(self.about["columns"])

    def __call__(self, answer: JudgedAnswer) -> float | str | None:
        """Return the reward, or why there is none; None: the function does not judge this answer."""
        columns = answer.row if self.about["columns"] is None else self.about["columns"]
        row = {name: answer.row[name] for name in columns if name in answer.row}
        reply = self.ask(asdict(replace(answer, row=row)))
        return reply if isinstance(reply, str) else reply["reward"]


def _served(name: str) -> tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
    """Return what `IsolatedReward.about` says of the reward of a name, and what answers a request."""
    reward = resolved(name)
    if not isinstance(reward, UserReward):
        judge = _direct(reward)
        return {"columns": [], "required": [], "takes_lists": False}, lambda request: {
            "reward": judge(JudgedAnswer(**request))
        }
    about = {"columns": reward.columns, "required": reward.required, "takes_lists": reward.takes_lists}
    return about, lambda request: {"reward": reward(JudgedAnswer(**request))}


if __name__ == "__main__":
    serve(lambda: _served(sys.argv[1]))
