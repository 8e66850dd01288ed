"""The origin of a figure: every benchmark writes its result with the machine, the versions and the commit."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from dualtune.base.versions import versions_of
from dualtune.engine.detect import detect

CODE = ("--", ":(top)", ":(top,exclude)benchmarks/results")
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("numpy", "tokenizers", "torch", "transformers", "mlx", "mlx-lm", "safetensors", "scikit-learn", "triton")


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write results/<name>.json."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"made_by": f"benchmarks/{name}.py", **origin(), **figures}, indent=2) + "\n")
    return path


def runs(name: str, under: str = "runs") -> dict[str, Any]:
    """The runs that results/<name>.json has, by key; older files have them under another name."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))[under] if path.is_file() else {}


def add_run(name: str, key: str, figures: dict[str, Any], **settings: Any) -> Path:
    """Write a run beside those that are there, with its own origin; `settings` are those of all runs."""
    return write(name, {**settings, "runs": runs(name) | {key: origin() | figures}})


def origin() -> dict[str, Any]:
    """The commit is that of the code only if nothing but results has changed since: "-dirty" says so."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "--short", *CODE) else ""),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu(),
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpu": _gpu(),
        },
        "versions": {"python": platform.python_version()} | versions_of(PACKAGES),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str | None:
    """Its name, and what makes products in bfloat16 fast; None where there is no /proc."""
    units = bfloat16_units()
    if units is None:
        return None
    return f"{_cpu_facts().get('model name', 'unknown')} ({', '.join(units) or 'neither avx512_bf16 nor amx_bf16'})"


def bfloat16_units() -> list[str] | None:
    """What makes products in bfloat16 fast on this CPU; None where there is no /proc."""
    facts = _cpu_facts()
    return [unit for unit in ("avx512_bf16", "amx_bf16") if unit in facts.get("flags", "").split()] if facts else None


def _cpu_facts() -> dict[str, str]:
    try:
        pairs = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, value in pairs}


def _gpu() -> str | None:
    return next((gpu.name for gpu in detect().gpus), None)
