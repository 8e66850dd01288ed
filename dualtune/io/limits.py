"""A function of this package, run in a process of its own with limits, for input that nobody vouches for.

Native code can neither be interrupted nor told how much memory it may take, and a failed allocation in it ends the
process. The child limits itself as soon as its imports are done; the parent watches it, and kills it at the deadline,
when it has grown too large (where the system keeps no limit itself), and when this process is asked to stop.
"""

from __future__ import annotations

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

from dualtune import interrupt
from dualtune.errors import EnvironmentFault

PATIENCE = 6  # times the seconds of the processor: other programs may keep the machine busy
PAUSE_S = 0.02
MAX_ANSWER = 10_000  # bytes
# One thread and one heap, so that the address space follows what is used.
QUIET = {
    "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """What the child may take beyond its imports."""

    memory_bytes: int
    cpu_s: int


class Exceeded(Exception):
    """The child did not answer within its limits."""


def run(module: str, data: bytes, limits: Limits) -> str:
    """What `answer(data)` of a module says, asked in a new interpreter. Exceeded where it may not."""
    environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "dualtune.io.limits", module, str(limits.memory_bytes), str(limits.cpu_s)]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as answer:
        given.write(data)
        given.seek(0)
        child = subprocess.Popen(command, stdin=given, stdout=answer, stderr=subprocess.DEVNULL, env=environment)
        try:
            _watch(child, limits)
        finally:
            child.kill()
            child.wait()
        answer.seek(0)
        if child.returncode > 0:
            raise EnvironmentFault(f"{' '.join(command)} cannot be run: it ended with exit code {child.returncode}")
        if child.returncode < 0:
            raise Exceeded(f"{limits.cpu_s} s of the processor or {limits.memory_bytes >> 20} MiB")
        return answer.read(MAX_ANSWER).decode("utf-8", "replace")


def _watch(child: subprocess.Popen[bytes], limits: Limits) -> None:
    """Return when it has ended, or must end."""
    deadline = time.monotonic() + PATIENCE * limits.cpu_s
    most = limits.memory_bytes + (512 << 20)  # the imports, and what is shared with other processes
    while time.monotonic() < deadline and _size(child.pid) <= most:
        try:
            child.wait(PAUSE_S)
            return
        except subprocess.TimeoutExpired:
            interrupt.poll()


def _size(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _restrict(memory_bytes: int, cpu_s: int) -> None:
    """Limit this process, from here on. macOS keeps no limit of the address space; the parent watches it."""
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
