"""The real module pynvml on a compiled libnvidia-ml.so.1 that has no driver under it (fake_nvml.c)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="pynvml loads libnvidia-ml.so.1"),
]
ERRORS = [  # NVML's code, our word for it, what fixes it
    (18, "mismatch", "sudo reboot"),
    (9, "not loaded", "sudo modprobe nvidia"),
    (4, "no permission", "usermod -aG video,render"),
    (15, "other", "dmesg"),
    (999, "other", "dmesg"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver")
    source, library = Path(__file__).with_name("fake_nvml.c"), path / "libnvidia-ml.so.1"
    command = [COMPILER, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def check_gpu(python, folder, monkeypatch):
    """`dualtune check-gpu --json` in a process that finds the library: (exit code, report)."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(*args, library=True, **environment):
        paths = {"LD_LIBRARY_PATH": str(folder)} if library else {"LD_LIBRARY_PATH": ""}
        result = python("-m", "dualtune.cli.main", "check-gpu", "--json", *args, env=paths | environment)
        assert result.stderr == ""
        return result.returncode, json.loads(result.stdout)

    return run


def row(report, name):
    return next(check for check in report["checks"] if check["name"] == name)


def test_a_card_is_read_from_the_library(check_gpu):
    _, report = check_gpu(FAKE_NVML_CARDS="h100")
    (gpu,) = report["machine"]["gpus"]
    (process,) = gpu.pop("processes")
    assert gpu == {
        "name": "NVIDIA H100 80GB HBM3", "total_bytes": 81559 << 20, "free_bytes": (81559 << 20) - (1 << 30),
        "compute_capability": "9.0", "uuid": "GPU-11111111-aaaa", "mig": None,
    }  # fmt: skip
    assert process["used_bytes"] == 512 << 20 and process["name"].startswith("python")
    assert (report["machine"]["driver"], report["machine"]["cuda"], report["label"]) == (
        "580.95.05",
        "13.0",
        "H100 class",
    )
    assert "0.5 GiB" in row(report, "programs")["found"]


def test_memory_that_is_in_use_is_not_promised(check_gpu):
    code, report = check_gpu("--require-memory", "79GiB", FAKE_NVML_CARDS="h100")
    assert (code, report["budget"]["bytes"]) == (4, (81559 << 20) - (1 << 30))
    assert check_gpu("--require-memory", "78GiB", FAKE_NVML_CARDS="h100")[0] == 0


def test_of_two_cards_the_first_is_judged_and_the_larger_named(check_gpu):
    _, report = check_gpu(FAKE_NVML_CARDS="t4,h100")
    assert report["label"] == "low"
    assert row(report, "larger GPU")["fix"] == "export CUDA_VISIBLE_DEVICES=GPU-11111111-aaaa"
    _, followed = check_gpu(FAKE_NVML_CARDS="t4,h100", CUDA_VISIBLE_DEVICES="GPU-11111111-aaaa")
    assert followed["label"] == "H100 class"


@pytest.mark.parametrize(("visible", "mig"), [(None, "1g.10gb"), ("MIG-55555555-eeee", "3g.40gb")])
def test_a_slice_is_a_gpu(check_gpu, visible, mig):
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    _, report = check_gpu(FAKE_NVML_CARDS="mig", **environment)
    (gpu,) = report["machine"]["gpus"]
    assert gpu["mig"] == mig and len(report["machine"]["hidden_gpus"]) == 1


def test_mig_mode_without_a_slice_is_named(check_gpu):
    code, report = check_gpu(FAKE_NVML_CARDS="mig-empty")
    assert (code, report["machine"]["gpus"]) == (4, [])
    assert "nvidia-smi mig -cgi" in row(report, "MIG")["fix"]


def test_an_empty_list_of_visible_gpus_is_named(check_gpu):
    code, report = check_gpu(FAKE_NVML_CARDS="h100", CUDA_VISIBLE_DEVICES="")
    assert code == 4
    assert row(report, "visibility")["fix"] == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(("number", "fault", "fix"), ERRORS)
def test_a_driver_that_fails_is_told_by_its_code(check_gpu, number, fault, fix):
    code, report = check_gpu(FAKE_NVML_ERROR=str(number))
    assert (code, report["machine"]["gpu_fault"]) == (4, fault)
    fixes = [check["fix"] for check in report["checks"] if check["level"] == "fail" and check["fix"]]
    if not report["machine"]["surroundings"]["nvidia_card"]:  # a container without its card would be blamed
        assert any(fix in text for text in fixes)


def test_without_a_library_there_is_no_driver(check_gpu):
    code, report = check_gpu(library=False)
    if report["machine"]["gpus"]:
        pytest.skip("this machine has a driver")
    assert (code, report["machine"]["gpu_fault"]) == (4, "no library")
