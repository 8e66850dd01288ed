"""Python of the user in a process of its own, which cannot end or stop a run: rewards and environments.

A request is a line of JSON on its standard input, the reply one on its standard output. A process that ends, or that
takes too long, costs the request, and is started again with the next one.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import ConfigError

START_S = 60.0  # until the file is imported, which may import much
READY, ERROR = "ready", "error"
ENDED = "its process ended"
# What a function imports when it is called counts as its time, and is lost with the process: so it fails for ever.
FIRST = "import at the head of the file what takes long to import, or raise rollouts.reward_timeout_s"

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Isolated:
    """What a module of ours serves under a name: `python -m MODULE NAME ARGUMENTS`."""

    def __init__(
        self, key: str, module: str, name: str, timeout_s: float, *arguments: str, start_s: float = START_S
    ) -> None:
        """Start the process, which says of itself what is in `about`. ConfigError if it cannot: `key` names it."""
        self._key, self._module, self._name, self._timeout_s = key, module, name, timeout_s
        self._arguments, self._start_s = arguments, start_s
        self._process: subprocess.Popen[str] | None = None
        self._has_replied = False  # since it was started
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.about: Mapping[str, Any] = {}
        self._start()

    def ask(self, request: Mapping[str, Any], timeout_s: float | None = None) -> dict[str, Any] | str:
        """Return the reply, or why there is none. `timeout_s`: another limit than that of all."""
        if self._process is None:
            self._start()
        process = cast("subprocess.Popen[str]", self._process)
        with contextlib.suppress(OSError):  # it has ended: there will be no reply
            cast(Any, process.stdin).write(json.dumps(request, default=str) + "\n")
            cast(Any, process.stdin).flush()
        reply = self._reply(self._timeout_s if timeout_s is None else timeout_s)
        if not isinstance(reply, str):
            self._has_replied = True
            return reply.get(ERROR, reply)
        if reply == ENDED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # it may have closed its output, and live
            reply = f"its process ended with {process.poll()}"
        elif not self._has_replied:
            reply = f"{reply} in its first call: {FIRST}"
        self.close()
        return reply

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended; else with what it has started
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # what was written and not read
                    cast(Any, stream).close()
            self._process = None

    def _start(self) -> None:
        command = [sys.executable, "-m", self._module, self._name, *self._arguments]
        # Ctrl-C is for the run, which decides when this process ends.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
        )
        self._lines, self._has_replied = queue.SimpleQueue(), False
        threading.Thread(target=_read_lines, args=(self._process.stdout, self._lines), daemon=True).start()
        reply = self._reply(self._start_s)
        if isinstance(reply, str) or READY not in reply:
            self.close()
            problem = f"{self._key}: '{self._name}' does not start: {reply}"
            raise ConfigError(problem if isinstance(reply, str) else reply[ERROR])
        self.about = reply[READY]

    def _reply(self, timeout_s: float) -> dict[str, Any] | str:
        """Return the next line that the process writes, or why there is none."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return f"took longer than {timeout_s:g} s"
        return json.loads(line) if line else ENDED


def _read_lines(stream: Any, lines: queue.SimpleQueue[str]) -> None:
    with contextlib.suppress(ValueError, OSError):  # it was closed
        for line in stream:
            lines.put(line)
    lines.put("")


# ----------------------------------------------------------------------------------------------------------------------
# Inside the process.


def serve(load: Callable[[], tuple[Mapping[str, Any], Answer]]) -> None:
    """Answer requests on standard input, one a line, until it ends.

    `load` returns what the process says of itself, and what answers a request. Whatever the user's code or a library
    of it prints goes to standard error: replies have a descriptor of their own.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(fields: Mapping[str, Any]) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    try:
        about, answer = load()
    except ConfigError as error:
        return reply({ERROR: str(error)})
    reply({READY: about})
    for line in sys.stdin:
        try:
            reply(answer(json.loads(line)))
        except Exception as error:  # noqa: BLE001  whatever the user's code raises
            reply({ERROR: f"{type(error).__name__}: {error}"})
    return None


def imported(key: str, path: Path, name: str) -> Any:
    """Return what a Python file calls `name`. ConfigError, which begins with the key, if there is no such thing."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{key}: {path} {_NO_FILE}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # what lies beside it can be imported, as when it is run
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    named = getattr(module, name, None)
    if not callable(named):
        raise ConfigError(f"{key}: {path} has no function or class '{name}'")
    return named


def check_defined(key: str, path: Path, name: str) -> None:
    """Raise ConfigError as `imported`, as far as the text of the file tells: nothing in it is run."""
    if not path.is_file():
        raise ConfigError(f"{key}: {path} {_NO_FILE}")
    try:
        parts = [*ast.walk(ast.parse(path.read_bytes()))]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    defined = {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    defined |= {part.id for part in parts if isinstance(part, ast.Name)}
    defined |= {part.asname or part.name for part in parts if isinstance(part, ast.alias)}
    if not {name, "*"} & defined:
        raise ConfigError(f"{key}: {path} has no function or class '{name}'")


_NO_FILE = "is not a file. Write the path of a Python file, then :NAME"


class Named:
    """A function of the user, called with those of the given arguments that it names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self.positional_only = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        self.names = [each.name for each in named]
        self.required = [each.name for each in named if each.default is each.empty]  # those that have no default
        self._function = function

    def __call__(self, **arguments: Any) -> Any:
        return self._function(**{k: v for k, v in arguments.items() if self.takes_all or k in self.names})
