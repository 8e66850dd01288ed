"""The process in which checks run: a GPU that has failed once answers every later call of its process with that error.

`python -m dualtune.doctor.selftest.process` reads a `CheckWork` as JSON from standard input. It writes lines of JSON to
standard output: {"begins": name} and then a `CheckResult` for each check, or {"fault": …} if the backend cannot be
opened. All else goes to standard error. It ends after the first check that raises: the caller starts another process
for the rest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from dualtune.base.errors import EnvironmentFault
from dualtune.doctor.selftest.case import SIZES, CheckFinding, DeviceCheck, Site
from dualtune.doctor.selftest.listed import checks_for
from dualtune.engine.backend import Backend
from dualtune.engine.card import card_of
from dualtune.engine.choose import PlatformChoice, open_backend

DEMO = Path(__file__).parents[2] / "demo"
DEMO_TRAINING = {"model.name": str(DEMO / "model"), "data.train": str(DEMO / "data" / "train.jsonl")}


@dataclass(frozen=True, slots=True)
class CheckWork:
    """Which checks a process runs."""

    platform: str
    backend: str
    device: str  # to open the backend with
    kind: str
    names: Sequence[str]  # of the checks, in this order


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A row of the report."""

    name: str
    title: str
    outcome: str
    words: str
    figures: dict[str, Any]
    tolerance: dict[str, float]
    seconds: float
    raised: bool = False  # an exception: the process may be of no further use


def main() -> None:
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        work = CheckWork(**json.load(sys.stdin))
        try:
            backend = open_backend(PlatformChoice(work.platform, work.backend, work.device, ""))
        except EnvironmentFault as error:
            print(json.dumps({"fault": str(error)}), file=out)
        else:
            perform(work, backend, out)


def perform(work: CheckWork, backend: Backend, out: IO[str]) -> None:
    """Run the checks, up to the first that raises."""
    card = card_of(work.backend)
    device = card.device(work.kind)
    assert device is not None  # the caller chose it from the card
    known = {check.name: check for check in checks_for(card, device)}
    for name in work.names:
        print(json.dumps({"begins": name}), file=out)
        with tempfile.TemporaryDirectory() as place:
            result = run_check(known[name], Site(backend, device, SIZES[work.kind], Path(place), DEMO_TRAINING))
        print(json.dumps(asdict(result)), file=out)
        if result.raised:
            break


def run_check(check: DeviceCheck, site: Site) -> CheckResult:
    """Run a check; an exception is a failure, with its first line."""
    start, raised = time.perf_counter(), False
    try:
        found = check.run(site)
    except Exception as error:  # noqa: BLE001  one check must not hide the others; its row has the error
        raised = True
        first = (str(error).strip().splitlines() or ["no message"])[0]
        short = "memory ran out: " if site.backend.is_out_of_memory(error) else ""
        found = CheckFinding("failed", f"{short}{type(error).__name__}: {first}")
    return row(check, found, time.perf_counter() - start, raised=raised)


def row(check: DeviceCheck, found: CheckFinding, seconds: float, *, raised: bool = False) -> CheckResult:
    """Return the row of a finding."""
    figures, tolerance = dict(found.figures), dict(found.tolerance)
    return CheckResult(check.name, check.title, found.outcome, found.words, figures, tolerance, seconds, raised)


if __name__ == "__main__":
    main()
