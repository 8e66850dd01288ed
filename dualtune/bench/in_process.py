"""A measurement in a process of its own, whose memory is sampled from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, Any

from dualtune.bench.ablation_process import AblationWork, Measured
from dualtune.profiler.process import process_reader

EVERY_S = 0.003


class Failed(Exception):
    """A measurement that could not be made. The message says why."""


def run_apart(work: AblationWork) -> tuple[Measured, int]:
    """Return what a process measured, and the most bytes that it had while it trained. Failed if it did not end well.

    On Linux they are the anonymous memory: mapped files, such as unchanged weights on a CPU, are not counted.
    """
    command = [sys.executable, "-P", "-m", "dualtune.bench.ablation_process"]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        try:
            json.dump(asdict(work), child.stdin)
            child.stdin.close()
            first, peak = child.stdout.readline(), 0
            with _sampling(process_reader(child.pid)) as most:
                answer = child.stdout.readline() if first == "loaded\n" else first
                peak = most()
        except BaseException:
            child.kill()
            raise
        code = child.wait()
        found: dict[str, Any] = json.loads(answer) if answer.startswith("{") else {"error": _reason(code, errors)}
    if "error" in found:
        raise Failed(found["error"])
    return Measured(**found), peak


@contextmanager
def _sampling(read: Callable[[], int]) -> Generator[Callable[[], int]]:
    """Sample a number in the background. Yields a function that returns the largest so far."""
    done, peak = threading.Event(), [0]

    def sample() -> None:
        while not done.wait(EVERY_S):
            try:
                peak[0] = max(peak[0], read())
            except OSError:  # the process has ended
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        done.set()
        thread.join()


def _reason(code: int, errors: IO[str]) -> str:
    errors.seek(0)
    last = next((line.strip() for line in reversed(errors.readlines()) if line.strip()), "")
    killed = f"it was killed by signal {-code}, perhaps because memory ran out" if code < 0 else ""
    return killed or last or f"it ended with code {code}"
