"""A measurement in a process of its own, whose memory is sampled from outside."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import IO, Any

from dualtune.doctor.bench.ablation_process import AblationWork, Measured
from dualtune.train.profiler.snapshot import process_reader

# ----------------------------------------------------------------------------------------------------------------------
# Paired differences over seeds, with their 95 % interval.

# Student's t, two-sided 95 %, by degrees of freedom; from 31 on the value for 30, which is a little too careful.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with half the width of its 95 % interval; None for a single value, which has none."""

    mean: float
    margin: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.margin is not None and abs(self.mean) > self.margin

    def as_json(self) -> dict[str, float | None]:
        return {"mean": self.mean, "margin_95": self.margin}


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values and its 95 % interval by Student's t distribution."""
    n = len(values)
    margin = _T_95[min(n - 1, len(_T_95)) - 1] * stdev(values) / math.sqrt(n) if n > 1 else None
    return Interval(fmean(values), margin)


def paired(mine: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the interval of the differences mine − other, pair by pair. ValueError if the numbers of values differ."""
    return interval([a - b for a, b in zip(mine, other, strict=True)])


# ----------------------------------------------------------------------------------------------------------------------
EVERY_S = 0.003


class Failed(Exception):
    """A measurement that could not be made. The message says why."""


def run_apart(work: AblationWork) -> tuple[Measured, int]:
    """Return what a process measured, and the most bytes that it had while it trained. Failed if it did not end well.

    On Linux they are the anonymous memory: mapped files, such as unchanged weights on a CPU, are not counted.
    """
    command = [sys.executable, "-P", "-m", "dualtune.doctor.bench.ablation_process"]
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
