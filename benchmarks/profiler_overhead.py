"""The cost of the memory timeline: processor time of all its snapshots in a step, as a share of a step of 100 ms.

    python benchmarks/profiler_overhead.py [--repeats 30] [--calls 2000] [--leak-steps 500]

The snapshots are taken in a loop, without training between them: comparing runs with and without them would measure
the noise of the machine. A step has three (data, micro-batch, optimizer). The cost is the lowest of all repeats, since
other work on a machine only adds time; the median is given too. Then a clean run of a tiny model on each backend shows
that no leak is found where there is none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import record

import dualtune
from dualtune.base.errors import EnvironmentFault
from dualtune.config import load_config
from dualtune.engine.backend import get_backend
from dualtune.show.run import run
from dualtune.train.hooks import PhaseChange, RunInfo
from dualtune.train.profiler.analysis import find_leak
from dualtune.train.profiler.profiler import Timeline
from dualtune.train.profiler.snapshot import read_timeline

DEMO = Path(dualtune.__file__).parent / "demo"
STEP_S, SNAPSHOTS_PER_STEP = 0.1, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--calls", type=int, default=2000, help="snapshots in a repeat")
    parser.add_argument("--leak-steps", type=int, default=500, help="steps of the clean run; 0: none")
    args = parser.parse_args()
    figures: dict[str, Any] = {"step_s": STEP_S, "snapshots_per_step": SNAPSHOTS_PER_STEP}
    for name in ("torch", "mlx"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                figures[name] = cost(name, Path(folder), args.repeats, args.calls)
            except EnvironmentFault as missing:
                figures[name] = str(missing)
                continue
            if args.leak_steps:
                figures[name]["clean_run"] = clean_run(name, Path(folder) / "run", args.leak_steps)
    path = record.write("profiler_overhead", figures)
    print(json.dumps(figures, indent=2), path, sep="\n")


def cost(name: str, folder: Path, repeats: int, calls: int) -> dict[str, Any]:
    """Return microseconds of processor time of a snapshot with its share of the writing, and of a step."""
    backend = get_backend(name, "cpu")
    device = "cuda" if backend.devices()[0].kind == "cuda" else "cpu"
    timeline = Timeline(folder / "memory.csv", backend.memory)
    timeline.on_start(RunInfo(folder, name, 1, 0, 1, 0, {"device": device}, 0))
    change = PhaseChange(1, "micro-batch", "data")
    times = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(calls):
            timeline.on_phase_change(change)
        times.append((time.process_time() - began) / calls)
    timeline.on_end()
    lowest, median = min(times), statistics.median(times)
    return {
        "snapshot_us": {"lowest": 1e6 * lowest, "median": 1e6 * median},
        "share_of_step": {
            "lowest": SNAPSHOTS_PER_STEP * lowest / STEP_S,
            "median": SNAPSHOTS_PER_STEP * median / STEP_S,
        },
        "bytes_per_step": SNAPSHOTS_PER_STEP * (folder / "memory.csv").stat().st_size / (repeats * calls),
    }


def clean_run(name: str, run_dir: Path, steps: int) -> dict[str, Any]:
    """Train the demo's model and judge its timeline."""
    config = load_config({
        "model": {"name": str(DEMO / "model")},
        "data": {"train": str(DEMO / "data" / "train.jsonl"), "eval": 0, "max_length": 64},
        "train": {"steps": steps, "documents_per_step": 1},
        "run": {"dir": str(run_dir), "save_every": steps},
    })  # fmt: skip
    run(config, get_backend(name, "cpu"))
    snapshots = read_timeline(run_dir / "memory.csv")
    found = {"used": find_leak(snapshots), "process": find_leak(snapshots, "process_bytes")}
    return {"steps": steps} | {
        f"{what}_leak": leak and {"bytes_per_step": leak.slope, "bound": leak.bound, "found": leak.found}
        for what, leak in found.items()
    }


if __name__ == "__main__":
    main()
