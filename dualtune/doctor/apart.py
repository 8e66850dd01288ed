"""Work in a process of its own: what it breaks, and the memory that it uses, end with it.

The process is `python -m MODULE`. It reads its work as JSON from standard input and answers with lines of JSON on
standard output; all else goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Answer = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Apart:
    """A process that works, as the one that has started it sees it."""

    child: subprocess.Popen[str]
    errors: IO[str]

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield what the process answers, until it ends."""
        assert self.child.stdout is not None
        return map(json.loads, self.child.stdout)

    def reason(self) -> str:
        """Return why the process ended: a signal, or its exit code and the last line that it wrote."""
        code = self.child.wait()
        self.errors.seek(0)
        last = next((line.strip() for line in reversed(self.errors.readlines()) if line.strip()), "")
        if code < 0:
            shortage = ", perhaps because memory ran out" if code == -9 else ""
            return f"its process was killed by signal {-code}{shortage}: {last}"
        return f"its process ended with code {code}: {last}"


@contextmanager
def apart(program: tuple[str, ...], work: DataclassInstance) -> Generator[Apart]:
    """Start a process on its work, such as ("-m", "dualtune.doctor.selftest.run"), and kill it after the block."""
    pipe = subprocess.PIPE
    # -P: no module of the current directory, which may hold anybody's files, is imported
    command = [sys.executable, "-P", *program]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as child,
    ):
        assert child.stdin is not None
        try:
            json.dump(asdict(work), child.stdin)
            child.stdin.close()
            yield Apart(child, errors)
        finally:
            child.kill()


@contextmanager
def at_work() -> Generator[tuple[dict[str, Any], Answer]]:
    """In the process: yield its work, and what sends an answer."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # what a library prints is not an answer
        yield json.load(sys.stdin), lambda message: print(json.dumps(message), file=out)
