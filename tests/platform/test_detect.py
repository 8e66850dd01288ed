"""What this machine is, as far as the system and the process tell: container, WSL, torch's build, control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualtune.engine import detect as apple
from dualtune.engine import detect as cpu
from dualtune.engine import detect as module
from dualtune.engine.card import Package
from dualtune.engine.detect import detect, surroundings, torch_cuda
from dualtune.engine.machine import GIB, Surroundings


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_rest_of_the_machine_is_what_the_system_says(nvml):
    nvml()
    machine = detect()
    uname = subprocess.run(["uname", "-sm"], capture_output=True, text=True, check=True).stdout.split()
    assert [machine.system, machine.arch] == uname
    assert machine.python == "{}.{}.{}".format(*sys.version_info[:3])
    assert machine.cpu and 1 <= machine.cores <= os.cpu_count()
    assert 2**28 < machine.available_bytes <= machine.memory_bytes
    assert machine.packages["transformers"] == __import__("transformers").__version__


def test_detection_imports_no_framework(python):
    code = "import sys; from dualtune.engine.detect import detect; detect(); print(*sys.modules)"
    assert not {"torch", "mlx", "transformers", "numpy"} & set(python("-c", code).stdout.split())


def test_the_cuda_that_torch_is_built_for_is_read_without_importing_it():
    torch = pytest.importorskip("torch")
    assert torch_cuda() == (torch.version.cuda or "none")


@pytest.mark.parametrize(
    ("line", "found"),
    [("cuda: Optional[str] = '12.8'", "12.8"), ("cuda: Optional[str] = None", "none"), ("cuda = '13.0'", "13.0"),
     ("debug = False", None)],
)  # fmt: skip
def test_builds_of_torch_are_told_apart(tmp_path, monkeypatch, line, found):
    write(tmp_path / "torch" / "version.py", f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    write(tmp_path / "torch" / "__init__.py", "raise SystemError('nobody should import this')")
    monkeypatch.setattr(module, "find_spec", lambda _: __import__("importlib.machinery").machinery.PathFinder.find_spec(
        "torch", [str(tmp_path)]))  # fmt: skip
    assert torch_cuda() == found


def test_a_framework_without_metadata_is_found_too(monkeypatch):
    monkeypatch.setattr(module, "versions_of", lambda names: {"transformers": "5"})
    monkeypatch.setattr(Package, "is_installed", property(lambda package: package.framework == "torch"))
    assert detect().packages == {"transformers": "5", "torch": "?"}


# --- surroundings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, Surroundings()),
        ({".dockerenv": ""}, Surroundings(container=True)),
        ({"run/.containerenv": ""}, Surroundings(container=True)),
        ({"proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2"}, Surroundings(wsl=True)),
        ({"proc/version": "Linux version 6.8.0-Microsoft", "usr/lib/wsl/lib/libnvidia-ml.so.1": ""},
         Surroundings(wsl=True, wsl_driver=True)),
        ({"sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n", "sys/bus/pci/devices/0000:01:00.0/class": "0x030000"},
         Surroundings(nvidia_card=True)),
        ({"sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n", "sys/bus/pci/devices/0000:01:00.1/class": "0x040300"},
         Surroundings()),  # the card's sound
        ({"sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n", "sys/bus/pci/devices/0000:00:02.0/class": "0x030000"},
         Surroundings()),  # an Intel GPU
        ({"dev/nvidia0": ""}, Surroundings(nvidia_device=True)),
    ],
)  # fmt: skip
def test_the_surroundings_are_read_from_the_system_s_files(tmp_path, files, found):
    for name, text in files.items():
        write(tmp_path / name, text)
    assert surroundings(tmp_path) == found


# --- the processor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model name\t: Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n",
         ("Xeon", ("AMX", "AVX-512", "AVX-512 bf16", "AVX2"))),
        ("model name\t: EPYC\nflags\t\t: fpu avx avx2\n", ("EPYC", ("AVX2",))),
        ("model name\t: Neoverse\nFeatures\t: fp asimd sve bf16\n", ("Neoverse", ("NEON", "NEON bf16", "SVE"))),
    ],
)  # fmt: skip
def test_the_processor_s_name_and_features_are_read_from_cpuinfo(tmp_path, text, found):
    write(tmp_path / "cpuinfo", text)
    assert cpu.linux_cpu(tmp_path / "cpuinfo") == found


def test_a_processor_is_amd_s_by_its_vendor(tmp_path, monkeypatch):
    """Not by the name, which a virtual machine may choose; without the file by what Windows says."""
    for text, found in {
        "vendor_id\t: AuthenticAMD\nmodel name\t: QEMU\n": True,
        "vendor_id\t: GenuineIntel\nmodel name\t: not AMD\n": False,
    }.items():
        write(tmp_path / "cpuinfo", text)
        assert cpu.is_amd(tmp_path / "cpuinfo") is found
    for text, found in (("AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", True), ("arm", False), ("", False)):
        monkeypatch.setattr(cpu.platform, "processor", lambda text=text: text)
        assert cpu.is_amd(tmp_path / "absent") is found


def test_a_processor_that_tells_nothing_still_has_a_name(tmp_path):
    name, features = cpu.linux_cpu(tmp_path / "absent")
    assert name and features == ()


V2, V1 = "sys/fs/cgroup/", "sys/fs/cgroup/memory/"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", V2 + "memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/\n", V2 + "memory.max": f"{8 * GIB}\n", V2 + "memory.current": f"{3 * GIB}",
          V2 + "memory.stat": f"anon 5\ninactive_file {GIB}\n"}, (8 * GIB, 2 * GIB)),
        # the strictest of a group and those above it
        ({"proc/self/cgroup": "0::/job/step\n", V2 + "job/memory.max": f"{4 * GIB}", V2 + "job/memory.current": "10",
          V2 + "job/memory.stat": "inactive_file 4", V2 + "job/step/memory.max": f"{6 * GIB}",
          V2 + "job/step/memory.current": "10", V2 + "job/step/memory.stat": "inactive_file 0"}, (4 * GIB, 6)),
        # version 1, in a container whose path is the host's
        ({"proc/self/cgroup": "4:memory:/docker/abc\n0::/\n", V1 + "memory.limit_in_bytes": f"{2 * GIB}",
          V1 + "memory.usage_in_bytes": "100", V1 + "memory.stat": "total_inactive_file 30\n"}, (2 * GIB, 70)),
        ({"proc/self/cgroup": "4:memory:/\n", V1 + "memory.limit_in_bytes": "9223372036854771712",
          V1 + "memory.usage_in_bytes": "100", V1 + "memory.stat": "total_inactive_file 30\n"}, None),
    ],
)  # fmt: skip
def test_the_control_group_s_limit_is_found(tmp_path, files, found):
    for name, text in files.items():
        write(tmp_path / name, text)
    assert cpu.memory_limit(tmp_path) == found


def test_a_control_group_s_limit_is_the_machine_s_memory(nvml, monkeypatch):
    nvml()
    monkeypatch.setattr(cpu, "memory_limit", lambda: (GIB, GIB // 4))
    machine = detect()
    assert (machine.memory_bytes, machine.memory_limit_bytes) == (GIB, GIB)
    assert machine.available_bytes == GIB * 3 // 4


def test_a_limit_above_the_memory_is_none(nvml, monkeypatch):
    nvml()
    monkeypatch.setattr(cpu, "memory_limit", lambda: (2**50, 0))
    assert detect().memory_limit_bytes is None


# --- Apple silicon ---------------------------------------------------------------------------------------------------

M4 = """machdep.cpu.brand_string: Apple M4
kern.osproductversion: 15.6
iogpu.wired_limit_mb: 0
hw.optional.AdvSIMD: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.avx2_0: 0
"""


@pytest.fixture
def mac(nvml, monkeypatch, tmp_path):
    """Pretend to be a Mac whose `sysctl` prints a text, with this many GiB."""
    nvml(init_error=(12, "NVML Shared Library Not Found"))

    def pretend(text: str, *, arch="arm64", gib=16):
        write(tmp_path / "bin" / "sysctl", f"#!/bin/sh\ncat <<'END'\n{text}END\nexit 1\n")  # unknown keys: status 1
        (tmp_path / "bin" / "sysctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(module.platform, "system", lambda: "Darwin")
        monkeypatch.setattr(module.platform, "machine", lambda: arch)
        memory = type("Memory", (), {"total": gib * GIB, "available": gib * GIB // 2})
        monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
        return detect()

    return pretend


def test_a_mac_is_read_from_sysctl(mac):
    machine = mac(M4)
    assert machine.is_apple_silicon and machine.is_mac_with_apple_silicon
    assert (machine.cpu, machine.macos, machine.cpu_features) == ("Apple M4", "15.6", ("NEON", "NEON bf16"))
    assert machine.metal_limit_bytes == 16 * GIB * 2 // 3
    assert machine.metal_limit_source == "assumed: 2/3 by default"


def test_a_python_under_rosetta_is_not_apple_silicon_on_a_mac_that_is(mac):
    machine = mac("machdep.cpu.brand_string: Apple M1\nsysctl.proc_translated: 1\n", arch="x86_64")
    assert machine.surroundings.rosetta
    assert (machine.is_apple_silicon, machine.is_mac_with_apple_silicon) == (False, True)


def test_an_intel_mac_has_no_metal_limit(mac):
    machine = mac("machdep.cpu.brand_string: Intel(R) Core(TM) i9\n", arch="x86_64")
    assert machine.metal_limit_bytes is None and not machine.is_mac_with_apple_silicon
    assert machine.kind == "cpu"


@pytest.mark.parametrize(
    ("gib", "wired_mb", "limit_bytes", "source"),
    [
        (36, None, 24 * GIB, "assumed: 2/3 by default"),
        (36, "0", 24 * GIB, "assumed: 2/3 by default"),
        (48, "0", 36 * GIB, "assumed: 3/4 by default"),
        (16, "12000", 12000 * 2**20, "iogpu.wired_limit_mb is 12000"),
    ],
)
def test_metal_s_limit_is_the_one_set_or_a_stated_share(gib, wired_mb, limit_bytes, source):
    assert apple.metal_limit(gib * GIB, wired_mb) == (limit_bytes, source)


def test_a_system_without_sysctl_is_no_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert apple.sysctl() == {}
