"""Checks in processes of their own: what one of them breaks, the others do not see."""

from functools import partial

import pytest

from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.doctor.selftest import run
from dualtune.doctor.selftest.case import DeviceCheck
from dualtune.doctor.selftest.run import CheckWork, failure, perform, run_checks, selected
from dualtune.engine.choose import PlatformChoice

CHOICE = PlatformChoice("cpu", "numpy", "cpu", "as requested")
# A process that does what the name of a check says, without a framework.
ACTOR = """
import json, os, signal, sys, time
work = json.load(sys.stdin)
for name in work["names"]:
    print(json.dumps({"begins": name}), flush=True)
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs":
        time.sleep(600)
    if name == "breaks":
        raise SystemExit("CUDA error: an illegal memory access was encountered")
    if name == "absent":
        print(json.dumps({"fault": "there is no GPU"}), flush=True)
        break
    raised = name == "raises"
    row = {"name": name, "level": "fail" if raised else "ok", "found": str(os.getpid())}
    print(json.dumps(row), flush=True)
    if raised:
        break
"""


def passing(site):
    return Check("b", "ok", "fine")


def raising(error, site):
    raise error


@pytest.fixture
def acted(monkeypatch, tmp_path):
    """Run checks of these names by the actor; those that begin with a + need a process of their own."""
    (tmp_path / "actor.py").write_text(ACTOR)
    monkeypatch.setattr(run, "PROCESS", (str(tmp_path / "actor.py"),))

    def go(*names):
        told = []
        checks = [DeviceCheck(name, "", passing, alone=name.startswith("+")) for name in names]
        results = run_checks(CHOICE, "cpu", checks, told.append)
        assert told == results and [row.name for row in results] == [*names]
        return results

    return go


def test_checks_share_a_process_until_one_raises_or_needs_its_own(acted):
    a, b, c, d, e = acted("a", "b", "raises", "d", "+e")
    assert a.found == b.found == c.found
    assert len({a.found, d.found, e.found}) == 3
    assert [row.level for row in (a, b, c, d, e)] == ["ok", "ok", "fail", "ok", "ok"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("dies", "killed by signal 9, perhaps because memory ran out"),
     ("breaks", "ended with code 1: CUDA error: an illegal memory access")],
)  # fmt: skip
def test_a_process_that_ends_is_the_failure_of_its_check_alone(acted, name, words):
    before, broken, after = acted("a", name, "c")
    assert (before.level, broken.level, after.level) == ("ok", "fail", "ok")
    assert (broken.name, broken.exit_code) == (name, 1)
    assert words in broken.found


def test_a_check_that_hangs_is_ended(acted, monkeypatch):
    monkeypatch.setattr(run, "LIMIT_S", 2)
    hung, after = acted("hangs", "c")
    assert (hung.level, hung.found, after.level) == ("fail", "did not end within 2 s", "ok")


def test_a_backend_that_cannot_be_opened_is_an_error(acted):
    with pytest.raises(EnvironmentFault, match="there is no GPU"):
        acted("absent", "b")


def test_an_exception_is_a_failure_in_its_own_words(open_backend, monkeypatch):
    checks = [DeviceCheck("a", "", partial(raising, ValueError("first line\nsecond"))), DeviceCheck("b", "", passing)]
    monkeypatch.setattr(run, "checks_for", lambda card, device: checks)
    answers = []
    perform(CheckWork("cpu", "numpy", "cpu", "cpu", ["a", "b"]), open_backend("numpy"), answers.append)
    begins, row = answers  # the process ends here, and another one does the rest
    assert begins == {"begins": "a"}
    assert (row["name"], row["level"], row["found"]) == ("a", "fail", "ValueError: first line")


def test_memory_that_runs_out_is_said(open_backend):
    assert failure("a", MemoryError(), open_backend("numpy")).found == "memory ran out: MemoryError: no message"


def test_only_selects_by_the_beginning_of_a_name():
    choice = PlatformChoice("cpu", "torch", "cpu", "as requested")
    kind, checks = selected(choice, ("numbers", "kernels/lora"))
    assert kind == "cpu" and [check.name for check in checks] == [
        "numbers/loss", "numbers/gradient", "numbers/optimizers", "kernels/lora float32",
    ]  # fmt: skip
    assert len(selected(choice, ())[1]) > 20
    with pytest.raises(ConfigError, match="got 'kernel/lora', allowed: device, numbers, kernels, waits, resume"):
        selected(choice, ("kernel/lora",))
