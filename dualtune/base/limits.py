"""Run a function of this package on untrusted input in a separate process with limits.

Native code cannot be interrupted or given a memory limit, and a failed allocation in it ends the process. The child
limits itself after its imports; the parent watches it, and kills it at the deadline, when it is too large (on systems
that enforce no memory limit), and when this process is asked to stop.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

import psutil

from dualtune.base import interrupt
from dualtune.base.errors import EnvironmentFault

PATIENCE = 6  # times the CPU limit, because the machine may be busy
PAUSE_S = 0.02
MAX_ANSWER = 10_000  # bytes
# One thread and one heap, so that the address space is close to the memory in use.
QUIET = {
    "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the child, beyond its imports."""

    memory_bytes: int
    cpu_s: int


class Exceeded(Exception):
    """The child did not answer within its limits."""


def run(module: str, data: bytes, limits: Limits) -> str:
    """Return `answer(data)` of a module, called in a new interpreter. Raises Exceeded if it exceeds its limits."""
    environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "dualtune.base.limits", module, str(limits.memory_bytes), str(limits.cpu_s)]
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answer:
        question.write(data)
        question.seek(0)
        child = subprocess.Popen(command, stdin=question, stdout=answer, stderr=subprocess.DEVNULL, env=environment)
        try:
            _watch(child, limits)
        finally:
            child.kill()
            child.wait()
        answer.seek(0)
        if child.returncode > 0:
            raise EnvironmentFault(f"{' '.join(command)} cannot be run: it ended with exit code {child.returncode}")
        if child.returncode < 0:
            raise Exceeded(f"{limits.cpu_s} s of CPU time or {limits.memory_bytes >> 20} MiB")
        return answer.read(MAX_ANSWER).decode("utf-8", "replace")


def _watch(child: subprocess.Popen[bytes], limits: Limits) -> None:
    """Wait until the child has ended or must be killed."""
    deadline = time.monotonic() + PATIENCE * limits.cpu_s
    most = limits.memory_bytes + (512 << 20)  # for the imports, and memory shared with other processes
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):  # it has ended
            if psutil.Process(child.pid).memory_info().rss > most:
                return
        try:
            child.wait(PAUSE_S)
            return
        except subprocess.TimeoutExpired:
            interrupt.poll()


def _restrict(memory_bytes: int, cpu_s: int) -> None:
    """Limit this process from now on. macOS enforces no address-space limit; there the parent watches the size."""
    used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + cpu_s, used_s + cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _main() -> None:
    module, memory_bytes, cpu_s = sys.argv[1:]
    answer = importlib.import_module(module).answer
    data = sys.stdin.buffer.read()
    _restrict(int(memory_bytes), int(cpu_s))
    try:
        text = answer(data)
    except MemoryError:
        os.kill(os.getpid(), SIGKILL)
        raise
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
