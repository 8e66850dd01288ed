"""What is sent: no name or path of the user, a verdict in words, and an archive that is read without trust."""

import getpass
import gzip
import io
import json
import socket
import tarfile
from dataclasses import replace

import pytest

from dualtune.base.checks import Check
from dualtune.base.errors import FormatError
from dualtune.doctor.selftest.report import anonymous, beside, default_name, read_report, report, write_archive
from dualtune.engine.choose import PlatformChoice
from dualtune.engine.machines import named

PASSED = Check("numbers/loss", "ok", "as the formula gives it", exit_code=1)
FAILED = Check("kernels/norms float32", "fail", "gradient 1.0e+00 apart", exit_code=1)
PLAIN = Check("kernels/mlp float32", "skipped", "nothing is compiled (no g++)", exit_code=1)
SPEEDS = {"tokens_per_s": 90.0, "predicted_tokens_per_s": 200.0}
SPEED = Check("speed", "ok", "90 tokens/s", figures=SPEEDS)


def recorded(dtype, *losses):
    return Check(f"recorded/{dtype}", "ok", "", figures={"losses": list(losses)})


def report_of(*results, machine="h100-80", kind="cuda"):
    return report(PlatformChoice("cuda", "torch", "cuda", ""), kind, named(machine), results)


def labels(found):
    return [line.split("  ")[0].strip() for line in found["verdict"]]


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_a_machine_that_works_is_told_to_train():
    found = report_of(PASSED)
    assert (found["ok"], found["exit_code"]) == (True, 0)
    assert found["verdict"][0].endswith("1 of 1 checks that could be made passed: numbers")
    assert "dualtune validate --tier quick" in found["verdict"][-1]


def test_a_failure_is_named_with_its_consequence(wording):
    found = report_of(PASSED, FAILED, PLAIN, SPEED)
    assert (found["ok"], found["exit_code"]) == (False, 1)
    assert labels(found) == ["works", "failed", "plain", "slow", "next", "next"]
    text = "\n".join(found["verdict"])
    wording(text)
    assert "model.kernels=reference" in text


def test_a_speed_near_its_prediction_is_not_slow():
    assert labels(report_of(replace(SPEED, figures=SPEEDS | {"tokens_per_s": 150.0}))) == [
        "works", "speed", "next",
    ]  # fmt: skip


def test_a_run_that_is_not_bitwise_is_said_even_where_it_passes():
    row = Check("resume/usual", "ok", "not bitwise: …", figures={"bitwise": False})
    assert labels(report_of(row)) == ["works", "differs", "next"]


# --- what leaves the machine -----------------------------------------------------------------------------------------


def test_nothing_names_the_user_the_host_or_a_directory(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "box7.example.org")
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    words = (
        "OSError: '/home/alice/venv/lib/x.py' of alice@box7, /tmp/torchinductor_alice/cache, key hunter2hunter2, "
        "1.2 tokens/s, https://pytorch.org/docs/stable"
    )
    found = report_of(replace(FAILED, found=words, figures={"at": [words], "loss": float("nan")}))
    text = json.dumps(found, allow_nan=False)
    assert not [secret for secret in ("alice", "box7", "/home", "/tmp", "hunter2") if secret in text]
    assert "'.../x.py'" in text and "1.2 tokens/s" in text and "https://pytorch.org/docs/stable" in text
    assert found["checks"][0]["figures"]["loss"] == "nan"


def test_numbers_and_words_stay_as_they_are():
    value = {"a": [1, 2.5, None, True], "b": "kernels/all float32: 3e-07 apart; 12 MiB"}
    assert anonymous(value) == value


def test_a_report_says_what_the_machine_is():
    found = report_of(PASSED)
    assert found["machine"]["name"] == "NVIDIA H100 80GB HBM3" and found["machine"]["driver"] == "580.95.05"
    assert "uuid" not in json.dumps(found["machine"])
    assert default_name(found) == f"dualtune-selftest-nvidia-h100-80gb-hbm3-{found['date']}.tar.gz"


# --- the archive -----------------------------------------------------------------------------------------------------


def test_an_archive_is_read_back(tmp_path):
    found = report_of(PASSED, FAILED)
    write_archive(tmp_path / "a.tar.gz", found)
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert read_report(tmp_path / "a.tar.gz") == read_report(tmp_path / "a.json") == found
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        assert {(each.name, each.uid, each.uname, each.mtime) for each in tar} == {
            ("report.json", 0, "", 0), ("verdict.txt", 0, "", 0),
        }  # fmt: skip


def archive_with(name, data, **changes):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        for key, value in changes.items():
            setattr(member, key, value)
        tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


GOOD = {"schema_version": 1, "machine": {}, "checks": [], "verdict": []}
BAD = {
    "empty": (b"", "is not an archive"),
    "cut": (archive_with("report.json", b"{}")[:-20], "is not an archive"),
    "a bomb": (gzip.compress(bytes(1 << 23)), "unpacks to more than"),
    "another file": (archive_with("../report.json", b"{}"), "holds no report.json"),
    "a link": (archive_with("report.json", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "holds no report.json"),
    "not JSON": (archive_with("report.json", b"["), "not valid JSON"),
    "a list": (archive_with("report.json", b"[]"), "must be an object"),
    "newer": (json.dumps(GOOD | {"schema_version": 2}).encode(), "Upgrade dualtune"),
    "no rows": (json.dumps(GOOD | {"checks": [{"name": "x"}]}).encode(), "rows of a self-test"),
    "no list": (json.dumps(GOOD | {"verdict": 3}).encode(), "must be a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_report_is_refused(tmp_path, name):
    data, message = BAD[name]
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        read_report(tmp_path / "x")


# --- two machines ----------------------------------------------------------------------------------------------------


def test_two_machines_agree_within_the_tolerance_of_their_dtype(wording):
    h100 = report_of(PASSED, recorded("float32", 2.0, 1.5), recorded("bfloat16", 2.01, 1.49), SPEED)
    mac = report_of(PLAIN, recorded("float32", 2.00003, 1.5), recorded("bfloat16", 2.0, 1.5), SPEED, machine="m4-32")
    found = beside(h100, mac)
    assert found.agree
    text = "\n".join(found.lines)
    wording(text)
    assert "NVIDIA H100" in text and "numbers/loss" in text


def test_two_machines_that_disagree_or_share_nothing_do_not_agree():
    a, far = report_of(recorded("float32", 2.0, 1.5)), report_of(recorded("float32", 2.0, 1.5001))
    sixteen, other = report_of(recorded("bfloat16", 2.0, 1.5)), report_of(recorded("float32", 2.0))
    assert beside(a, a).agree
    assert not any(beside(a, b).agree for b in (far, sixteen, other, report_of(PASSED)))
