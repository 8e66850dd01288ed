"""What a sweep saves against a process for each run: time, processor time and peak memory.

    python benchmarks/sweep.py [--runs 4] [--rounds 3] [--quantization nf4]

A model of SmolLM2-135M's shape with random weights is trained for a few short steps with several learning rates: once
by `dualtune sweep`, once by `dualtune train` for each rate, in turns. A run before them, which does not count, fills
the caches of tokenized data and compiled code. Each run evaluates only a few documents before its steps and after them,
or their time would hide what a process costs. Writes results/sweep.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
from load_memory import write_in_shards
from startup import COMMAND

import dualtune

DEMO = Path(dualtune.__file__).parent / "demo"
MODEL = "HuggingFaceTB/SmolLM2-135M"
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
EVALUATED = 4  # documents, as many as a step trains on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4, choices=range(2, len(RATES) + 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", default="nf4")
    options = parser.parse_args()
    rates = RATES[: options.runs]
    found: dict[str, list[dict[str, float]]] = {"sweep": [], "trains": []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _write_inputs(place, options.quantization)
        _cost(place, [_train(rates[0])])
        values = f"train.learning_rate={','.join(map(str, rates))}"
        for _ in range(options.rounds):
            shutil.rmtree(place / "runs")
            found["sweep"].append(_cost(place, [["sweep", "config.yaml", "--set", values, "--platform", "cpu"]]))
            found["trains"].append(_cost(place, [_train(rate) for rate in rates]))
    ratios = {
        name: statistics.median(a[name] / b[name] for a, b in zip(found["sweep"], found["trains"], strict=True))
        for name in ("seconds", "cpu_seconds", "peak_bytes")
    }
    settings: dict[str, Any] = {"model": MODEL, "runs": options.runs, "quantization": options.quantization}
    print(ratios, record.write("sweep", {**settings, "rounds": found, "sweep_over_trains": ratios}))


def _write_inputs(place: Path, quantization: str) -> None:
    write_in_shards(place / "model", MODEL)
    for path in (DEMO / "model").glob("*token*"):
        shutil.copy(path, place / "model")
    heldout = (DEMO / "data/heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (place / "heldout.jsonl").write_text("".join(heldout[:EVALUATED]), encoding="utf-8")
    (place / "config.yaml").write_text(
        f"model: {{name: model, quantization: {quantization}}}\n"
        f"data: {{train: {DEMO / 'data/train.jsonl'}, eval: heldout.jsonl, max_length: 64}}\n"
        "train: {steps: 3, documents_per_step: 4, warmup: 0}\n"
        "run: {dir: runs/it, eval_every: null, save_every: null}\n",
        encoding="utf-8",
    )


def _train(rate: float) -> list[str]:
    return [
        "train", "config.yaml", "--set", f"train.learning_rate={rate}", "--set", f"run.dir=runs/{rate}", "--platform",
        "cpu",
    ]  # fmt: skip


def _cost(place: Path, commands: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return what these commands take together, one after another; the peak is that of the largest."""
    began, cpu, peak = time.perf_counter(), 0.0, 0
    for words in commands:
        child = subprocess.Popen([sys.executable, "-c", COMMAND, *words], cwd=place, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        if status:
            raise RuntimeError(f"{words} has failed")
        cpu, peak = cpu + used.ru_utime + used.ru_stime, max(peak, used.ru_maxrss * 1024)
    return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu, "peak_bytes": peak}


if __name__ == "__main__":
    main()
