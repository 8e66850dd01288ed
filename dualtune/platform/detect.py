"""Find GPUs, Apple silicon and CPU by asking the driver and the system, not a deep-learning framework."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import psutil

from dualtune.card import by_preference
from dualtune.platform import apple, cpu, nvidia
from dualtune.platform.machine import Gpu, Machine, Surroundings
from dualtune.versions import versions_of

__all__ = ["Gpu", "Machine", "detect", "is_installed"]

OTHER_PACKAGES = ("transformers", "peft", "pynvml")  # `pynvml` only to warn about it: see problems.py
NVIDIA_VENDOR = "0x10de"


def detect() -> Machine:
    """Inspect this machine. Never raises: what cannot be detected is reported as unknown."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = nvidia.query(visible_devices)
    name, features = cpu.linux_cpu()
    memory = psutil.virtual_memory()
    machine = Machine(
        system=platform.system(),
        arch=platform.machine(),
        python=platform.python_version(),
        cpu=name,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        gpus=list(found.visible),
        driver=found.driver,
        cuda=found.cuda,
        gpu_problem=found.problem,
        packages=_packages(),
        hidden_gpus=found.hidden,
        gpu_fault=found.fault,
        mig_without_slice=found.mig_without_slice,
        unreadable_gpus=found.unreadable,
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


def is_installed(framework: str) -> bool:
    """Return whether a backend's framework can be found, without importing it."""
    return find_spec(framework) is not None


def _packages() -> dict[str, str]:
    """Return the versions of the relevant packages, also of a framework on the path without metadata."""
    packages = [card.package for card in by_preference()]
    found = versions_of(dict.fromkeys([*(name for each in packages for name in each.detected), *OTHER_PACKAGES]))
    frameworks = [each.framework for each in packages if each.framework]
    return found | {name: "?" for name in frameworks if name not in found and is_installed(name)}


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
    values = apple.sysctl()
    limit_bytes, source = apple.metal_limit(machine.memory_bytes, values.get("iogpu.wired_limit_mb"))
    rosetta = apple.is_rosetta(machine.arch, values)
    has_metal = machine.arch == "arm64" or rosetta
    return replace(
        machine,
        cpu=values.get("machdep.cpu.brand_string") or "Apple",
        cpu_features=apple.features(values),
        macos=values.get("kern.osproductversion") or platform.mac_ver()[0],
        metal_limit_bytes=limit_bytes if has_metal else None,
        metal_limit_source=source if has_metal else "",
        surroundings=replace(machine.surroundings, rosetta=rosetta),
    )


def _within_limit(machine: Machine) -> Machine:
    """Reduce the memory to the limit of the control group, if that is lower."""
    limit = cpu.memory_limit()
    if limit is None or limit[0] >= machine.memory_bytes:
        return machine
    limit_bytes, used_bytes = limit
    return replace(
        machine,
        memory_bytes=limit_bytes,
        available_bytes=min(machine.available_bytes, max(0, limit_bytes - used_bytes)),
        memory_limit_bytes=limit_bytes,
    )
