"""The report of a self-test: versions, the machine, a row for each check, the verdict."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dualtune.platform.choose import PlatformChoice
from dualtune.platform.machine import Machine
from dualtune.selftest.anonymous import anonymous
from dualtune.selftest.process import CheckResult
from dualtune.selftest.verdict import verdict
from dualtune.train.state.records import recorded_packages
from dualtune.versions import VERSION, versions_of

SCHEMA_VERSION = 1
FAILED = 1  # exit code
# Variables that change how a framework computes or takes memory.
SETTINGS = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING", "MLX_ENABLE_TF32", "DUALTUNE_KERNELS", "OMP_NUM_THREADS",
)  # fmt: skip


def report(choice: PlatformChoice, kind: str, machine: Machine, results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the report as JSON values. It names no user, host or directory."""
    code = exit_code_of(results)
    found = {
        "schema_version": SCHEMA_VERSION,
        "ok": code == 0,
        "exit_code": code,
        "dualtune": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "platform": choice.platform,
        "backend": choice.backend,
        "kind": kind,
        "machine": _described(machine, kind),
        "packages": versions_of(recorded_packages()),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "checks": [_row(result) for result in results],
        "verdict": verdict(results),
    }
    return anonymous(found)


def exit_code_of(results: Sequence[CheckResult]) -> int:
    """Return 0, or 1 if a check failed."""
    return FAILED if any(result.outcome == "failed" for result in results) else 0


def machine_name(machine: Machine, kind: str) -> str:
    """Return what a reader calls the machine: its GPU, or its processor."""
    return machine.gpus[0].name if kind == "cuda" and machine.gpus else machine.cpu


def _described(machine: Machine, kind: str) -> dict[str, Any]:
    gpus = [
        {"name": gpu.name, "bytes": gpu.total_bytes, "capability": gpu.compute_capability, "mig": gpu.mig}
        for gpu in machine.gpus
    ]
    return {
        "name": machine_name(machine, kind), "system": machine.system, "arch": machine.arch, "python": machine.python,
        "cpu": machine.cpu, "cores": machine.cores, "memory_bytes": machine.memory_bytes, "gpus": gpus,
        "driver": machine.driver, "cuda": machine.cuda, "macos": machine.macos,
        "metal_limit_bytes": machine.metal_limit_bytes,
    }  # fmt: skip


def _row(result: CheckResult) -> Mapping[str, Any]:
    return {
        "name": result.name, "title": result.title, "result": result.outcome, "words": result.words,
        "figures": result.figures, "tolerance": result.tolerance, "seconds": round(result.seconds, 2),
    }  # fmt: skip
