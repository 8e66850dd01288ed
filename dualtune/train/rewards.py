"""Rewards of answers: built-in ones, and Python functions of the user, which cannot end or stop a run.

A reward is a number for an answer, given the prompt and the answer of the data. What a user wrote runs in a process of
its own: one that raises or hangs costs the reward of its answer, and the run goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import math
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.base.files import expanded


class Reward(Protocol):
    """Returns the reward of a completion."""

    def __call__(self, completion: str, *, prompt: str, expected: str) -> float: ...


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """What a reward sees."""

    prompt: str  # the text before the answer, as the template writes it
    completion: str
    expected: str  # the answer of the data


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


BUILT_IN: Mapping[str, Reward] = {"exact": exact, "contains": contains, "number": number, "json": json_fields}
WITH_ARGUMENT: Mapping[str, Callable[[str], Reward]] = {"regex": matches, "brief": brief}


def resolved(name: str) -> Reward:
    """Return the reward of a name: a built-in one, regex:PATTERN, brief:CHARACTERS, or FILE.py:FUNCTION.

    Raises ConfigError for any other name, and for a file or function that is not there or cannot be imported.
    """
    kind, _, argument = name.partition(":")
    if name in BUILT_IN:
        return BUILT_IN[name]
    if kind in WITH_ARGUMENT:
        try:
            return WITH_ARGUMENT[kind](argument)
        except (ValueError, re.error) as error:
            raise ConfigError(f"rollouts.rewards: got '{name}': {error}") from error
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function:
        own = ", ".join([*BUILT_IN, "regex:PATTERN", "brief:CHARACTERS"])
        raise ConfigError(f"rollouts.rewards: got '{name}', allowed: {own}, or a Python function as FILE.py:FUNCTION")
    return _imported(expanded(file), function)


def _imported(path: Path, function: str) -> Reward:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"rollouts.rewards: {path} is not a file. Write the path of a Python file, then :FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # what lies beside it can be imported, as when it is run
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"rollouts.rewards: {path} cannot be imported: {type(error).__name__}: {error}") from error
    made: Any = getattr(module, function, None)
    if not callable(made):
        raise ConfigError(f"rollouts.rewards: {path} has no function '{function}'")
    names = inspect.signature(made).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())

    def reward(completion: str, **given: str) -> Any:  # what is no number is found where it is used
        return made(completion, **{key: value for key, value in given.items() if takes_all or key in names})

    return reward


def short_name(name: str) -> str:
    """Return the name of a reward without its argument or file."""
    kind, _, rest = name.rpartition(":") if _is_of_user(name) and not name.startswith("regex:") else name.partition(":")
    return rest if kind.endswith(".py") else kind


# ----------------------------------------------------------------------------------------------------------------------
# The rewards of a run.


@dataclass(frozen=True, slots=True)
class JudgedAnswers:
    values_NR: np.ndarray  # float64, of each reward; NaN where it failed
    totals_N: np.ndarray  # float64: their weighted sum, NaN if one failed
    failures: tuple[str, ...]  # why, for people


class Rewards:
    """The rewards that a config names, each with its weight. Close it: it may have processes."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], timeout_s: float) -> None:
        """Raise ConfigError for a reward that is not there. `timeout_s`: that a user's function may take."""
        self.names, self._weights_R = tuple(names), np.array(weights or [1.0] * len(names))
        self._score = [Isolated(name, timeout_s) if _is_of_user(name) else _direct(resolved(name)) for name in names]

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
            if isinstance(score, Isolated):
                score.close()


def _is_of_user(name: str) -> bool:
    """Return whether a reward may hang: a function of the user, or a pattern."""
    return name.partition(":")[0] not in (*BUILT_IN, "brief")


def _direct(reward: Reward) -> Callable[[JudgedAnswer], float | str]:
    return lambda answer: reward(answer.completion, prompt=answer.prompt, expected=answer.expected)


START_S = 60.0  # until the file of a function is imported, which may import much
READY = {"ready": True}


class Isolated:
    """A reward in a process of its own, which is started again after an answer that it did not survive."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._start()

    def __call__(self, answer: JudgedAnswer) -> float | str:
        """Return the reward, or why there is none."""
        if self._process is None:
            self._start()
        process = cast("subprocess.Popen[str]", self._process)
        fields = {"completion": answer.completion, "prompt": answer.prompt, "expected": answer.expected}
        with contextlib.suppress(OSError):  # it has ended: there will be no reply
            cast(Any, process.stdin).write(json.dumps(fields) + "\n")
            cast(Any, process.stdin).flush()
        reply = self._reply(self._timeout_s)
        if not reply:
            code = None if reply is None else process.wait()
            self.close()
            return f"took longer than {self._timeout_s:g} s" if code is None else f"its process ended with {code}"
        return reply["reward"] if "reward" in reply else reply["error"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # what was written and not read
                    cast(Any, stream).close()
            self._process = None

    def _start(self) -> None:
        command = [sys.executable, "-m", "dualtune.train.rewards", self._name]
        # Ctrl-C is for the run, which decides when this process ends.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(self._process.stdout, self._lines), daemon=True).start()
        reply = self._reply(START_S)
        if reply != READY:
            self.close()
            raise ConfigError(reply["error"] if reply else f"rollouts.rewards: '{self._name}' does not start")

    def _reply(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line that the process writes: empty if it has ended, None if there is none in time."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return json.loads(line or "{}")


def _read_lines(stream: Any, lines: queue.SimpleQueue[str]) -> None:
    with contextlib.suppress(ValueError, OSError):  # it was closed
        for line in stream:
            lines.put(line)
    lines.put("")


def serve(name: str) -> None:
    """Answer requests on standard input, one a line, until it ends. What the reward prints goes to standard error."""
    replies, sys.stdout = sys.stdout, sys.stderr

    def reply(fields: Mapping[str, Any]) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    try:
        reward = resolved(name)
    except ConfigError as error:
        return reply({"error": str(error)})
    reply(READY)
    for line in sys.stdin:
        try:
            value = float(reward(**json.loads(line)))
            reply({"reward": value} if math.isfinite(value) else {"error": f"returned {value}"})
        except Exception as error:  # noqa: BLE001  whatever the user's function raises
            reply({"error": f"{type(error).__name__}: {error}"})
    return None


if __name__ == "__main__":
    serve(sys.argv[1])
