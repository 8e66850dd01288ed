"""Find GPUs, Apple silicon and CPU by asking the driver and the system, not a deep-learning framework."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import psutil

from dualtune.base.versions import versions_of
from dualtune.engine import nvidia
from dualtune.engine.card import by_preference
from dualtune.engine.machine import GIB, Machine, Surroundings

# ----------------------------------------------------------------------------------------------------------------------
# The CPU: its name, its features for fast matrix products, and the memory limit of its control group.

# (flag in /proc/cpuinfo, its name): x86 under "flags", Arm under "Features"
CPU_FEATURES = (
    ("amx_bf16", "AMX"),
    ("avx512f", "AVX-512"),
    ("avx512_bf16", "AVX-512 bf16"),
    ("avx2", "AVX2"),
    ("asimd", "NEON"),
    ("bf16", "NEON bf16"),
    ("sve", "SVE"),
)
CPUINFO = Path("/proc/cpuinfo")


def linux_cpu(cpuinfo: Path = CPUINFO) -> tuple[str, tuple[str, ...]]:
    """Return name and features from /proc/cpuinfo."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(f"{facts.get('flags', '')} {facts.get('Features', '')}".split())
    name = facts.get("model name") or platform.processor() or platform.machine()
    return name, tuple(feature for flag, feature in CPU_FEATURES if flag in flags)


def is_amd(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the CPU is AMD's, by /proc/cpuinfo, or by the name that Windows has for it."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        text = platform.processor()
    return "AuthenticAMD" in text


def memory_limit(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the bytes that the control group of this process may use, and those it uses; None if not limited.

    Works for versions 1 and 2 of control groups; the strictest limit of the group and its parents counts. Cached file
    pages that can be dropped do not count as used.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits: list[tuple[int, int]] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's and not exist: the top directory is then the container's.
        folders = [top / path.strip("/"), *(top / path.strip("/")).parents]
        limits += [limit for folder in folders if folder.is_relative_to(top) and (limit := _limit(folder, *names))]
    return min(limits, default=None, key=lambda limit: limit[0] - limit[1])


def _limit(folder: Path, maximum: str, current: str, inactive: str) -> tuple[int, int] | None:
    try:
        limit = (folder / maximum).read_text().strip()
        if not limit.isdigit() or int(limit) >= 2**60:  # unlimited: "max", or nearly 2^63 in version 1
            return None
        used = int((folder / current).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit), max(0, used - int(statistics.get(inactive, 0)))


# ----------------------------------------------------------------------------------------------------------------------
# Apple silicon: chip, macOS, Rosetta, and how much unified memory Metal gives to programs, by one call of sysctl.

KEYS = (
    "machdep.cpu.brand_string",
    "kern.osproductversion",  # platform.mac_ver() returns 10.16 in programs that were built for old systems
    "iogpu.wired_limit_mb",
    "sysctl.proc_translated",
    "hw.optional.neon",
    "hw.optional.AdvSIMD",
    "hw.optional.arm.FEAT_BF16",
    "hw.optional.arm.FEAT_SME",
    "hw.optional.avx2_0",
    "hw.optional.avx512f",
)
APPLE_FEATURES = (  # (key, what it is called)
    ("hw.optional.AdvSIMD", "NEON"),
    ("hw.optional.arm.FEAT_BF16", "NEON bf16"),
    ("hw.optional.arm.FEAT_SME", "SME"),
    ("hw.optional.avx512f", "AVX-512"),
    ("hw.optional.avx2_0", "AVX2"),
)
# Metal's default limit is not published; these shares of the memory are reported lower bounds of its
# recommendedMaxWorkingSetSize. An M5 Max with 128 GiB and macOS 26 has 0.84: github.com/antirez/ds4/pull/893.
SMALL_MEMORY_BYTES, SMALL_SHARE, LARGE_SHARE = 36 * GIB, (2, 3), (3, 4)


def sysctl() -> dict[str, str]:
    """Return the keys that this Mac knows, with their values."""
    try:
        # It reports unknown keys on stderr and still prints the others.
        result = subprocess.run(["sysctl", *KEYS], capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(":") for line in result.stdout.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def metal_limit(memory_bytes: int, wired_limit_mb: str | None) -> tuple[int, str]:
    """Return the bytes that Metal gives to programs, and their source. `wired_limit_mb`: from sysctl; 0 is unset."""
    if wired_limit_mb and wired_limit_mb.isdigit() and int(wired_limit_mb) > 0:
        return int(wired_limit_mb) * 2**20, f"iogpu.wired_limit_mb is {wired_limit_mb}"
    part, whole = SMALL_SHARE if memory_bytes <= SMALL_MEMORY_BYTES else LARGE_SHARE
    return memory_bytes * part // whole, f"assumed: {part}/{whole} by default"


def features(values: dict[str, str]) -> tuple[str, ...]:
    """Return the CPU features that speed up matrix products."""
    return tuple(name for key, name in APPLE_FEATURES if values.get(key) == "1")


def is_rosetta(arch: str, values: dict[str, str]) -> bool:
    """Return whether this is an Intel Python that Rosetta translates."""
    apple_chip = "Apple" in values.get("machdep.cpu.brand_string", "")
    return values.get("sysctl.proc_translated") == "1" or (arch == "x86_64" and apple_chip)


# ----------------------------------------------------------------------------------------------------------------------
OTHER_PACKAGES = ("transformers", "peft", "pynvml")  # `pynvml` only to warn about it: see problems.py
NVIDIA_VENDOR = "0x10de"


def detect() -> Machine:
    """Inspect this machine. Never raises: what cannot be detected is reported as unknown."""
    # The driver is asked, and no framework: importing one takes seconds, and may fail for what is looked for.
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    answer = nvidia.query(visible_devices)
    name, features = linux_cpu()
    memory = psutil.virtual_memory()
    machine = Machine(
        system=platform.system(),
        arch=platform.machine(),
        python=platform.python_version(),
        cpu=name,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        gpus=list(answer.visible),
        driver=answer.driver,
        cuda=answer.cuda,
        gpu_problem=answer.problem,
        packages=_packages(),
        hidden_gpus=answer.hidden,
        gpu_fault=answer.fault,
        mig_without_slice=answer.mig_without_slice,
        unreadable_gpus=answer.unreadable,
        visible_devices=visible_devices,
        cpu_features=features,
        torch_cuda=torch_cuda(),
        surroundings=surroundings(),
    )
    return _as_mac(machine) if machine.system == "Darwin" else _within_limit(machine)


BUSY_SHARE = 0.25  # of the CPUs at work for others: then a measured rate is not that of this machine


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the CPUs of this machine are."""

    average: float  # processes that computed or waited for a CPU, over the last minute
    cpus: int

    @property
    def is_busy(self) -> bool:
        return self.average >= BUSY_SHARE * self.cpus

    def __str__(self) -> str:
        return (
            f"the load is {self.average:.1f} on {self.cpus} CPUs (mean of the last minute), so this machine is slower "
            "now than it is alone, and so is what was measured"
        )


def load_average() -> Load | None:
    """Return the load of this machine; None where the system does not tell it."""
    try:
        return Load(os.getloadavg()[0], os.cpu_count() or 1)
    except OSError:
        return None


def _packages() -> dict[str, str]:
    """Return the versions of the relevant packages, also of a framework on the path without metadata."""
    packages = [card.package for card in by_preference()]
    names = [*(name for package in packages for name in package.detected), *OTHER_PACKAGES]
    versions = versions_of(dict.fromkeys(names))
    without_metadata = (p.framework for p in packages if p.framework not in versions and p.is_installed)
    return versions | {framework: "?" for framework in without_metadata if framework}


def torch_cuda() -> str | None:
    """Return the CUDA version that torch is built for, from its version.py: "13.0", "none", or None without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    line = re.search(r"^cuda\b[^=\n]*=\s*(?:None|'([0-9.]+)')", text, re.MULTILINE)
    return (line[1] or "none") if line else None


def surroundings(root: Path = Path("/")) -> Surroundings:
    """Detect containers, WSL, and the NVIDIA hardware that the kernel knows."""
    return Surroundings(
        wsl="microsoft" in _read(root / "proc/version").lower(),
        wsl_driver=(root / "usr/lib/wsl/lib/libnvidia-ml.so.1").exists(),
        container=any((root / name).exists() for name in (".dockerenv", "run/.containerenv")),
        nvidia_card=any(
            _read(device / "vendor").strip() == NVIDIA_VENDOR and _read(device / "class").startswith("0x03")
            for device in (root / "sys/bus/pci/devices").glob("*")
        ),
        nvidia_device=(root / "dev/nvidia0").exists(),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _as_mac(machine: Machine) -> Machine:
    values = sysctl()
    limit_bytes, source = metal_limit(machine.memory_bytes, values.get("iogpu.wired_limit_mb"))
    rosetta = is_rosetta(machine.arch, values)
    has_metal = machine.arch == "arm64" or rosetta
    return replace(
        machine,
        cpu=values.get("machdep.cpu.brand_string") or "Apple",
        cpu_features=features(values),
        macos=values.get("kern.osproductversion") or platform.mac_ver()[0],
        metal_limit_bytes=limit_bytes if has_metal else None,
        metal_limit_source=source if has_metal else "",
        surroundings=replace(machine.surroundings, rosetta=rosetta),
    )


def _within_limit(machine: Machine) -> Machine:
    """Reduce the memory to the limit of the control group, if that is lower."""
    limit = memory_limit()
    if limit is None or limit[0] >= machine.memory_bytes:
        return machine
    limit_bytes, used_bytes = limit
    return replace(
        machine,
        memory_bytes=limit_bytes,
        available_bytes=min(machine.available_bytes, max(0, limit_bytes - used_bytes)),
        memory_limit_bytes=limit_bytes,
    )
