"""The time of a step of DoRA beside that of LoRA, with dropout and without, on torch on a CPU.

    python benchmarks/dora.py [--shape llama-19m] [--threads 1] [--rounds 12] [SETTINGS …]

Two engines on the same documents take steps in turns, forth and back; a ratio is that of two steps of one round, so
that what else the machine does meets both. Writes results/dora.json: the median ratio and its quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from fast_pieces import documents_of, stepper
from peers_inputs import SHAPES

from dualtune.engine.backend import Backend, get_backend

SETTINGS = ("dtype=float32", "dtype=float32,dropout=0.05", "dtype=bfloat16", "dtype=bfloat16,dropout=0.05")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-19m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("settings", nargs="*", default=SETTINGS, help="as a variant of fast_pieces.py")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    backend = get_backend("torch", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        batches = documents_of(args.shape, Path(folder))[1]
        found = {setting: compare(backend, Path(folder), batches, setting, args.rounds) for setting in args.settings}
    figures = {"shape": args.shape, "threads": args.threads, "dora_over_lora": found}
    print(json.dumps(figures, indent=2), record.write("dora", figures), sep="\n")


def compare(backend: Backend, model: Path, batches: list[Any], setting: str, rounds: int) -> dict[str, Any]:
    steps = {method: stepper(backend, model, batches, f"{setting},method={method}") for method in ("lora", "dora")}
    for step in steps.values():
        step(), step()
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    for number in range(rounds):
        for method in list(steps)[:: -1 if number % 2 else 1]:
            seconds[method].append(steps[method]())
    ratios = [dora / lora for lora, dora in zip(seconds["lora"], seconds["dora"], strict=True)]
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).round(3).tolist()
    found = {
        "median_ratio": median,
        "quartiles": [low, high],
        "median_seconds": {method: round(statistics.median(s), 4) for method, s in seconds.items()},
    }
    print(setting, found, flush=True)
    return found


if __name__ == "__main__":
    main()
