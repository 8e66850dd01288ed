"""Predictive training against the same schedule without it, and against a shorter one of the same cost.

    python benchmarks/hybrid.py [--shared ../shared] [--seeds 1] [--cases tuned,slow]

stories260k learns GSM8K with LoRA of rank 8; torch on the CPU in float32 with one thread. The arms of a case and seed:

    baseline       the schedule, every step computed
    predict        hybrid.engine: predict
    fast_forward   hybrid.engine: fast_forward
    control        for each of these two: a baseline whose whole schedule has as many steps as its cost buys

A prediction is worth something only if its arm ends below its control. Costs are in steps, probes by their tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads

import record
from stories_gsm8k import HELD_OUT, base_config

import dualtune
from dualtune.hybrid.confidence import calibration
from dualtune.train.state.metrics import read_rows

ROOT = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    # A rate that is right for cosine here, and a quarter of it with a larger batch: where predictions could pay.
    "tuned": {"train": {"steps": 160, "documents_per_step": 8, "learning_rate": 8e-3},
              "hybrid": {"warmup_steps": 30}},
    "slow": {"train": {"steps": 80, "documents_per_step": 32, "learning_rate": 2e-3},
             "hybrid": {"warmup_steps": 12, "full_steps": 8}},
}  # fmt: skip
COUNTS = ("attempts", "accepted", "undone", "virtual_steps", "micro_corrections", "divergences", "disabled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    pairs: list[tuple[float, bool]] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["DUALTUNE_CACHE"] = str(Path(name) / "cache")
        base = base_config(Path(name), args.shared.resolve())
        for seed in range(1, args.seeds + 1):
            for case in args.cases.split(","):
                for row in arms(case, base, seed, Path(name), pairs):
                    found.append({"case": case, "seed": seed, **row})
                    print(json.dumps(found[-1]), flush=True)
    bins = [{"confidence": b.mean_confidence, "kept": b.share_better, "number": b.number} for b in calibration(pairs)]
    print(record.write("hybrid", {"held_out_rows": HELD_OUT, "cases": CASES, "runs": found, "calibration": bins}))


def arms(case: str, base: dict[str, Any], seed: int, folder: Path, pairs: list[tuple[float, bool]]):
    steps = CASES[case]["train"]["steps"]
    yield {"arm": "baseline", "cost_steps": steps, **trained(case, base, seed, folder / f"{case}-{seed}")}
    for engine in ("predict", "fast_forward"):
        run_dir = folder / f"{case}-{seed}-{engine}"
        result = trained(case, base, seed, run_dir, hybrid={"enabled": True, "engine": engine, **CASES[case]["hybrid"]})
        events = [row for row in read_rows(run_dir / "metrics.jsonl") if "event" in row]
        pairs += outcomes(events)
        report = next(row for row in events if row["event"] == "hybrid")
        cost = steps * report["cost"] / report["cost_without"]
        yield {"arm": engine, "cost_steps": cost, **result, "phases": report["phases"],
               **{name: report[name] for name in COUNTS}}  # fmt: skip
        control = trained(case, base, seed, folder / f"{case}-{seed}-{engine}-control", steps=round(cost))
        yield {"arm": f"control of {engine}", "cost_steps": round(cost), **control}


def trained(
    case: str, base: dict[str, Any], seed: int, run_dir: Path, hybrid: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    run = {"dir": str(run_dir), "seed": seed, "eval_every": None, "save_every": None}
    config = {**base, "train": {**CASES[case]["train"], **train}, "run": run, "hybrid": hybrid or {}}
    return {"eval_loss": dualtune.train(config, "cpu").eval_loss}


def outcomes(events: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    """Return (confidence, did it pass its check) of every accepted prediction."""
    found: list[tuple[float, bool]] = []
    waiting: list[float] = []
    for row in events:
        if row["event"] == "predicted":
            waiting.append(row["confidence"])
        elif row["event"] in ("prediction_kept", "prediction_undone"):
            found += [(sure, row["event"] == "prediction_kept") for sure in waiting]
            waiting = []
    return found


if __name__ == "__main__":
    main()
