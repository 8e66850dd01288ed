"""The CPU: its name, its features for fast matrix products, and the memory limit of its control group."""

from __future__ import annotations

import platform
from pathlib import Path

# (flag in /proc/cpuinfo, its name): x86 under "flags", Arm under "Features"
FEATURES = (
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
    return name, tuple(feature for flag, feature in FEATURES if flag in flags)


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
