"""Checks in processes of their own: what one of them breaks, the others do not see."""

import io
import json
from functools import partial

import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.doctor.selftest import process, run
from dualtune.doctor.selftest.case import CheckFinding, DeviceCheck
from dualtune.doctor.selftest.process import CheckWork, perform
from dualtune.doctor.selftest.run import run_checks, selected
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
    result = {"name": name, "title": "", "outcome": "failed" if raised else "passed", "words": str(os.getpid()),
              "figures": {}, "tolerance": {}, "seconds": 0.0, "raised": raised}
    print(json.dumps(result), flush=True)
    if result["raised"]:
        break
"""


def passing(site):
    return CheckFinding("passed", "fine")


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
        assert told == results and [result.name for result in results] == [*names]
        return results

    return go


def test_checks_share_a_process_until_one_raises_or_needs_its_own(acted):
    a, b, c, d, e = acted("a", "b", "raises", "d", "+e")
    assert a.words == b.words == c.words
    assert len({a.words, d.words, e.words}) == 3
    assert [each.outcome for each in (a, b, c, d, e)] == ["passed", "passed", "failed", "passed", "passed"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("dies", "killed by signal 9, perhaps because memory ran out"),
     ("breaks", "ended with code 1: CUDA error: an illegal memory access")],
)  # fmt: skip
def test_a_process_that_ends_is_the_failure_of_its_check_alone(acted, name, words):
    before, broken, after = acted("a", name, "c")
    assert (before.outcome, broken.outcome, after.outcome) == ("passed", "failed", "passed")
    assert words in broken.words


def test_a_check_that_hangs_is_ended(acted, monkeypatch):
    monkeypatch.setattr(run, "LIMIT_S", 2)
    hung, after = acted("hangs", "c")
    assert (hung.outcome, hung.words, after.outcome) == ("failed", "did not end within 2 s", "passed")


def test_a_backend_that_cannot_be_opened_is_an_error(acted):
    with pytest.raises(EnvironmentFault, match="there is no GPU"):
        acted("absent", "b")


def test_an_exception_is_a_failure_in_its_own_words(open_backend, monkeypatch):
    checks = [DeviceCheck("a", "", partial(raising, ValueError("first line\nsecond"))), DeviceCheck("b", "", passing)]
    monkeypatch.setattr(process, "checks_for", lambda card, device: checks)
    out = io.StringIO()
    perform(CheckWork("cpu", "numpy", "cpu", "cpu", ["a", "b"]), open_backend("numpy"), out)
    begins, result = map(json.loads, out.getvalue().splitlines())
    assert begins == {"begins": "a"}
    assert (result["outcome"], result["words"]) == ("failed", "ValueError: first line")
    assert result["raised"]  # so the process ends here, and another one does the rest


def test_memory_that_runs_out_is_said(open_backend):
    site = process.Site(open_backend("numpy"), None, None, None, {})
    found = process.run_check(DeviceCheck("a", "", partial(raising, MemoryError())), site)
    assert found.words == "memory ran out: MemoryError: no message"


def test_only_selects_by_the_beginning_of_a_name():
    choice = PlatformChoice("cpu", "torch", "cpu", "as requested")
    kind, checks = selected(choice, ("numbers", "kernels/lora"))
    assert kind == "cpu" and [check.name for check in checks] == [
        "numbers/loss", "numbers/gradient", "numbers/optimizers", "kernels/lora float32",
    ]  # fmt: skip
    assert len(selected(choice, ())[1]) > 20
    with pytest.raises(ConfigError, match="got 'kernel/lora', allowed: device, numbers, kernels, waits, resume"):
        selected(choice, ("kernel/lora",))
