"""From a machine to a backend and to a verdict, always with the reason. The machines are made up."""

import json

import pytest

from dualtune.errors import ConfigError, EnvironmentFault
from dualtune.platform import choose as module
from dualtune.platform.choose import Choice, choose, verdict
from dualtune.platform.detect import Gpu, Machine

MIB, GIB = 2**20, 2**30
# What NVML reports for cards of these labels.
CARDS = [
    ("NVIDIA H200", 143771, "H100 class", True),
    ("NVIDIA H100 80GB HBM3", 81559, "H100 class", True),
    ("NVIDIA A100 80GB PCIe", 81920, "H100 class", True),
    ("NVIDIA L40S", 46068, "adequate", True),
    ("NVIDIA GeForce RTX 4090", 24564, "adequate", True),
    ("NVIDIA L4", 23034, "adequate", True),
    ("NVIDIA RTX 4000 Ada Generation", 20475, "low", True),
    ("NVIDIA GeForce RTX 4080", 16376, "too small", False),
    ("Tesla T4", 15360, "too small", False),
]
MACS = [(64, "good", True), (32, "good", True), (24, "limited", True), (16, "limited", True), (8, "too small", False)]


def machine(*, gpu=None, mib=0, problem=None, system="Linux", arch="x86_64", cpu="EPYC", gib=64) -> Machine:
    gpus = [Gpu(gpu, mib * MIB, mib * MIB, "9.0")] if gpu else []
    return Machine(system, arch, "3.12.1", cpu, 8, gib * GIB, gib * GIB, gpus, gpu_problem=problem)


def mac(gib=32):
    return machine(system="Darwin", arch="arm64", cpu="Apple M4", gib=gib)


H100 = machine(gpu="NVIDIA H100 80GB HBM3", mib=81559)
BARE = machine(problem="NVML Shared Library Not Found")


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these frameworks are installed."""
    return lambda *names: monkeypatch.setattr(module, "is_installed", lambda name: name in names)


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "names", "expected"),
    [
        (mac(), ("mlx",), Choice("mlx", "mlx", "auto", "Apple silicon (Apple M4) with MLX installed")),
        (mac(), ("torch", "mlx"), Choice("mlx", "mlx", "auto", "Apple silicon (Apple M4) with MLX installed")),
        (mac(), ("torch",), Choice("cpu", "torch", "cpu", "MLX is not installed; torch on the CPU")),
        (H100, ("torch", "mlx"),
         Choice("cuda", "torch", "cuda", "NVIDIA GPU (NVIDIA H100 80GB HBM3) with torch installed")),
        (BARE, ("torch", "mlx"), Choice("cpu", "torch", "cpu", "no NVIDIA GPU; torch on the CPU")),
        (BARE, ("mlx",),
         Choice("mlx", "mlx", "auto", "no NVIDIA GPU and no torch; MLX on the CPU, which is slow")),
    ],
)  # fmt: skip
def test_auto_chooses_what_suits_and_says_why(installed, machine, names, expected):
    installed(*names)
    assert choose("auto", machine) == expected


def test_a_gpu_without_torch_is_not_called_absent(installed):
    installed("mlx")
    choice = choose("auto", H100)
    assert choice.backend == "mlx"
    assert "no NVIDIA GPU" not in choice.reason and "torch" in choice.reason


@pytest.mark.parametrize(("machine", "extra"), [(mac(), "mlx"), (H100, "torch"), (BARE, "torch")])
def test_without_any_framework_the_line_that_installs_one_is_given(installed, machine, extra):
    installed()
    with pytest.raises(EnvironmentFault) as caught:
        choose("auto", machine)
    assert f"pip install 'dualtune[{extra}]'" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "backend", "device"),
    [("mlx", "mlx", "auto"), ("cuda", "torch", "cuda"), ("cpu", "torch", "cpu"), ("numpy", "numpy", "auto")],
)
def test_what_is_asked_for_is_taken(asked, backend, device):
    assert choose(asked, BARE) == Choice(asked, backend, device, "as asked")


def test_an_unknown_platform_is_refused():
    with pytest.raises(ConfigError, match=r"--platform: got 'tpu', allowed: auto, mlx, cuda, cpu"):
        choose("tpu")


def test_auto_looks_at_this_machine(installed, monkeypatch):
    installed("mlx")
    monkeypatch.setattr(module, "detect", mac)
    assert choose("auto").platform == "mlx"


# --- the verdict -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mib", "label", "ok"), CARDS)
def test_gpus_are_judged_by_their_memory(installed, name, mib, label, ok):
    installed("torch")
    found = verdict(machine(gpu=name, mib=mib))
    assert (found.ok, found.text) == (ok, f"{name} with {mib / 1024:.1f} GiB: {label}")


@pytest.mark.parametrize(("gib", "label", "ok"), MACS)
def test_macs_are_judged_by_their_unified_memory(installed, gib, label, ok):
    installed("mlx")
    assert verdict(mac(gib)) == module.Verdict(ok, f"Apple M4 with {gib} GiB of unified memory: {label}")


@pytest.mark.parametrize(("machine", "extra"), [(mac(), "mlx"), (H100, "torch")])
def test_an_accelerator_without_its_package_is_not_ok(installed, machine, extra):
    installed()
    found = verdict(machine)
    assert not found.ok
    assert found.text.endswith(f"is not installed: pip install 'dualtune[{extra}]'")


def test_no_accelerator_is_not_ok_and_the_driver_s_words_are_given(installed):
    installed("torch", "mlx")
    assert verdict(BARE) == module.Verdict(
        False,
        "no NVIDIA GPU (NVML Shared Library Not Found) and no Apple silicon; "
        "tiny models can be trained with --platform cpu",
    )
    assert "no NVIDIA GPU is visible" in verdict(machine()).text


# --- dualtune check-gpu ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "names", "code", "platform"),
    [
        (H100, ("torch",), 0, "cuda"),
        (machine(gpu="Tesla T4", mib=15360), ("torch",), 4, "cuda"),
        (H100, (), 4, "none"),
        (BARE, ("torch",), 4, "cpu"),
        (mac(32), ("mlx",), 0, "mlx"),
        (mac(8), ("mlx",), 4, "mlx"),
    ],
)
def test_the_exit_code_is_the_verdict(installed, monkeypatch, dualtune_main, machine, names, code, platform):
    installed(*names)
    monkeypatch.setattr("dualtune.platform.detect.detect", lambda: machine)
    plain, report = dualtune_main("check-gpu"), dualtune_main("check-gpu", "--json")
    assert (plain.returncode, report.returncode, plain.stderr) == (code, code, "")
    found = json.loads(report.stdout)
    assert (found["ok"], found["platform"]) == (code == 0, platform)
    assert found["machine"]["cpu"] == machine.cpu
    verdict_line = f"verdict    {'ok' if code == 0 else 'not ok'}: {found['verdict']}"
    assert plain.stdout.splitlines()[-1] == verdict_line
    assert f"platform   {platform}: {found['reason']}" in plain.stdout
