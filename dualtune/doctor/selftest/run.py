"""Run the checks in processes of their own: what one of them breaks, the others do not see."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO, Any

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.doctor.selftest.case import CheckFinding, DeviceCheck
from dualtune.doctor.selftest.listed import checks_for
from dualtune.doctor.selftest.process import CheckResult, CheckWork, row
from dualtune.engine.card import card_of
from dualtune.engine.choose import PlatformChoice
from dualtune.engine.detect import detect

PROCESS = ("-P", "-m", "dualtune.doctor.selftest.process")
LIMIT_S = 300  # for a check, which takes seconds, or a minute where it compiles: a hang must not cost the rest
Tell = Callable[[CheckResult], object]


def selected(choice: PlatformChoice, only: Sequence[str]) -> tuple[str, list[DeviceCheck]]:
    """Return the kind of device, and the checks whose names begin with one of `only`; all of them if it is empty."""
    card = card_of(choice.backend)
    kind = card.kind_for(choice.platform, detect().kinds)
    device = card.device(kind) if kind else None
    if kind is None or device is None:
        raise EnvironmentFault(f"platform {choice.platform}: this machine has no device for {choice.backend}")
    checks = checks_for(card, device)
    unknown = [name for name in only if not any(check.name.startswith(name) for check in checks)]
    if unknown:
        groups = dict.fromkeys(check.name.partition("/")[0] for check in checks)
        raise ConfigError(f"--only: got '{unknown[0]}', allowed: {', '.join(groups)}, or the name of one check")
    return kind, [check for check in checks if not only or check.name.startswith(tuple(only))]


def run_checks(choice: PlatformChoice, kind: str, checks: Sequence[DeviceCheck], tell: Tell) -> list[CheckResult]:
    """Run the checks in order and return a row for each. EnvironmentFault if the backend cannot be opened."""
    results: list[CheckResult] = []

    def keep(result: CheckResult) -> None:
        results.append(result)
        tell(result)

    left = list(checks)
    while left:
        together = left[:1] if left[0].alone else _until_alone(left)
        work = CheckWork(choice.platform, choice.backend, choice.device, kind, [check.name for check in together])
        _run_apart(work, together, keep)
        left = list(checks)[len(results) :]
    return results


def _until_alone(checks: Sequence[DeviceCheck]) -> list[DeviceCheck]:
    return list(checks[: next((i for i, check in enumerate(checks) if check.alone), len(checks))])


def _run_apart(work: CheckWork, checks: Sequence[DeviceCheck], keep: Callable[[CheckResult], None]) -> None:
    """Run checks in one process, and keep at least one row: if it dies, a failure of the check that it was at."""
    command, pipe = [sys.executable, *PROCESS], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        limit, done, began = TimeLimit(child), 0, time.perf_counter()
        try:
            json.dump(asdict(work), child.stdin)
            child.stdin.close()
            for line in child.stdout:
                limit.renew()
                found: dict[str, Any] = json.loads(line)
                if "fault" in found:
                    raise EnvironmentFault(found["fault"])
                if "begins" in found:
                    began = time.perf_counter()
                else:
                    keep(CheckResult(**found))
                    done += 1
            code = child.wait()
        finally:
            limit.end()
            child.kill()
        if code != 0 or done == 0:
            reason = f"did not end within {LIMIT_S} s" if limit.is_over else _reason(code, errors)
            keep(row(checks[done], CheckFinding("failed", reason), time.perf_counter() - began))


class TimeLimit:
    """Kills a process that has said nothing for `LIMIT_S` seconds."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.is_over = False
        self._timer = self._started()

    def _started(self) -> threading.Timer:
        timer = threading.Timer(LIMIT_S, self._kill)
        timer.daemon = True
        timer.start()
        return timer

    def _kill(self) -> None:
        self.is_over = True
        self._child.kill()

    def renew(self) -> None:
        self._timer.cancel()
        self._timer = self._started()

    def end(self) -> None:
        self._timer.cancel()


def _reason(code: int, errors: IO[str]) -> str:
    """Return why a process ended without a row: a signal, or the last line that it wrote."""
    errors.seek(0)
    last = next((line.strip() for line in reversed(errors.readlines()) if line.strip()), "")
    if code < 0:
        shortage = ", perhaps because memory ran out" if code == -9 else ""
        return f"its process was killed by signal {-code}{shortage}: {last}"
    return f"its process ended with code {code}: {last}"
