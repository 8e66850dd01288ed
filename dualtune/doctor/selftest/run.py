"""Run the checks in processes of their own: what one of them breaks, the others do not see.

A GPU that has failed once answers every later call of its process with that error. So the command starts a process on a
`CheckWork`, which answers {"begins": name} and then a `Check` for each check, or {"fault": …} if the backend cannot be
opened. The process ends after the first check that raises, and the command starts another one for the rest.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.doctor.apart import Answer, apart, at_work
from dualtune.doctor.selftest.case import SIZES, DeviceCheck, Site
from dualtune.doctor.selftest.correctness import kernel_checks, number_checks, recorded_checks, resume_checks
from dualtune.doctor.selftest.cost import device_check, memory_checks, speed_check, wait_checks
from dualtune.engine.backend import Backend
from dualtune.engine.card import Card, Device, card_of
from dualtune.engine.choose import PlatformChoice, open_backend
from dualtune.engine.detect import detect

DEMO = Path(__file__).parents[2] / "demo"
DEMO_TRAINING = {"model.name": str(DEMO / "model"), "data.train": str(DEMO / "data" / "train.jsonl")}


# ----------------------------------------------------------------------------------------------------------------------
# Which checks there are for a device.


def checks_for(card: Card, device: Device) -> list[DeviceCheck]:
    """Return the checks in the order in which they run. Known without a framework."""
    return [
        device_check(),
        *number_checks(),
        *kernel_checks(card, device),
        *wait_checks(device.quantizations),
        *resume_checks(device.kind),
        *recorded_checks(("float32", device.auto_dtype)),
        *memory_checks(SIZES[device.kind]),
        speed_check(),
    ]


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


# ----------------------------------------------------------------------------------------------------------------------
# In the command: start processes, and read their rows.

PROCESS = ("-m", "dualtune.doctor.selftest.run")
LIMIT_S = 300  # for a check, which takes seconds, or a minute where it compiles: a hang must not cost the rest
Tell = Callable[[Check], object]


def run_checks(choice: PlatformChoice, kind: str, checks: Sequence[DeviceCheck], tell: Tell) -> list[Check]:
    """Run the checks in order and return a row for each. EnvironmentFault if the backend cannot be opened."""
    rows: list[Check] = []

    def keep(row: Check) -> None:
        rows.append(row)
        tell(row)

    while remaining := checks[len(rows) :]:
        num_together = next((i for i, check in enumerate(remaining) if check.alone), len(remaining)) or 1
        together = remaining[:num_together]
        work = CheckWork(choice.platform, choice.backend, choice.device, kind, [check.name for check in together])
        _run_apart(work, together, keep)
    return rows


def _run_apart(work: CheckWork, checks: Sequence[DeviceCheck], keep: Callable[[Check], None]) -> None:
    """Run checks in one process, and keep at least one row: if it dies, a failure of the check that it was at."""
    with apart(PROCESS, work) as process:
        limit, done, began = TimeLimit(process.child), 0, time.perf_counter()
        try:
            for message in process.answers():
                limit.renew()
                if "fault" in message:
                    raise EnvironmentFault(message["fault"])
                if "begins" in message:
                    began = time.perf_counter()
                else:
                    keep(Check(**message))
                    done += 1
            code = process.child.wait()
        finally:
            limit.end()
        if code != 0 or done == 0:
            reason = f"did not end within {LIMIT_S} s" if limit.is_over else process.reason()
            keep(_timed(Check(checks[done].name, "fail", reason), checks[done], time.perf_counter() - began))


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


# ----------------------------------------------------------------------------------------------------------------------
# In the process.


@dataclass(frozen=True, slots=True)
class CheckWork:
    """Which checks a process runs."""

    platform: str
    backend: str
    device: str  # to open the backend with
    kind: str
    names: Sequence[str]  # of the checks, in this order


def main() -> None:
    with at_work() as (table, answer):
        work = CheckWork(**table)
        try:
            backend = open_backend(PlatformChoice(work.platform, work.backend, work.device, ""))
        except EnvironmentFault as error:
            answer({"fault": str(error)})
        else:
            perform(work, backend, answer)


def perform(work: CheckWork, backend: Backend, answer: Answer) -> None:
    """Run the checks, up to the first that raises."""
    card = card_of(work.backend)
    device = card.device(work.kind)
    assert device is not None  # the caller chose it from the card
    checks = {check.name: check for check in checks_for(card, device)}
    for name in work.names:
        answer({"begins": name})
        start, has_raised = time.perf_counter(), False
        with tempfile.TemporaryDirectory() as directory:
            try:
                row = checks[name].run(Site(backend, device, SIZES[work.kind], Path(directory), DEMO_TRAINING))
            except Exception as error:  # noqa: BLE001  one check must not hide the others; its row has the error
                row, has_raised = failure(name, error, backend), True
        answer(asdict(_timed(row, checks[name], time.perf_counter() - start)))
        if has_raised:
            break


def failure(name: str, error: Exception, backend: Backend) -> Check:
    """Return the row of a check that raised, with the first line of the error."""
    line = (str(error).strip().splitlines() or ["no message"])[0]
    shortage = "memory ran out: " if backend.is_out_of_memory(error) else ""
    return Check(name, "fail", f"{shortage}{type(error).__name__}: {line}")


def _timed(row: Check, check: DeviceCheck, seconds: float) -> Check:
    return replace(row, title=check.title, seconds=seconds, exit_code=DualtuneError.exit_code)


if __name__ == "__main__":
    main()
