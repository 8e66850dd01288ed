"""What better weights from the same steps are worth: schedules that decay, schedule-free AdamW, averages of the weights.

    python benchmarks/averaging.py [--shared ../shared] [--seeds 1 2 3] [--runs DIRECTORY]

stories260k learns GSM8K with LoRA for 240 steps, on torch on one thread of the CPU in float32. Each arm has its own
learning rate, and the seeds are those of the order of the data and of the adapter's start. The control is the cosine
schedule, once with all the steps and once compressed to nine tenths of them. `--runs` keeps the run directories: what
was trained there before is not trained again. The table in docs/averaging.md is `table` of the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS, DOCUMENTS, HELD_OUT = 240, 16, 200
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}  # Student's t, two-sided, by degrees of freedom
CONTROL = "cosine"
ARMS: Mapping[str, Mapping[str, Any]] = {
    CONTROL: {"learning_rate": 8e-3},
    "cosine, 0.9 of the steps": {"learning_rate": 8e-3, "steps": STEPS * 9 // 10},
    "linear": {"learning_rate": 8e-3, "schedule": "linear"},
    "schedule_free": {"learning_rate": 1.1e-2, "schedule": "schedule_free"},
    "constant": {"learning_rate": 6e-3, "schedule": "constant"},
    "constant, tail over 0.2": {"learning_rate": 6e-3, "schedule": "constant", "average": "tail", "average_over": 0.2},
    "constant, tail over 0.4": {"learning_rate": 6e-3, "schedule": "constant", "average": "tail", "average_over": 0.4},
    "constant, ema over 0.1": {"learning_rate": 6e-3, "schedule": "constant", "average": "ema", "average_over": 0.1},
    "constant, ema over 0.2": {"learning_rate": 6e-3, "schedule": "constant", "average": "ema", "average_over": 0.2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--only", nargs="+", default=list(ARMS), help="arms to train, without writing the result")
    parser.add_argument(
        "--table", action="store_true", help="print the table of the recorded result, and train nothing"
    )
    args = parser.parse_args()
    if args.table:
        import record

        return print(table(json.loads((record.RESULTS / "averaging.json").read_text(encoding="utf-8"))))
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch, which is not imported yet
    with tempfile.TemporaryDirectory() as name:
        folder = args.runs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        losses: dict[str, list[float]] = {arm: [] for arm in args.only}
        for seed in args.seeds:
            for arm, found in losses.items():
                found.append(loss_of(arm, seed, folder, args.shared.resolve()))
                print(f"seed {seed}, {arm}: {found[-1]:.4f}", file=sys.stderr, flush=True)
    if len(losses) == len(ARMS):
        write(losses, args.seeds)
    return None


def loss_of(arm: str, seed: int, folder: Path, shared: Path) -> float:
    """Train one arm with one seed, unless its run directory has ended, and return the evaluation loss at the end."""
    import dualtune

    data = shared / "data/gsm8k/train.jsonl"
    rows = data.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = {"train": rows[:-HELD_OUT], "eval": rows[-HELD_OUT:]}
    for part, some in parts.items():
        (folder / f"{part}.jsonl").write_text("".join(some), encoding="utf-8")
    config = {
        "model": {"name": str(shared / "models/stories260k")},
        "adapter": {"rank": 8, "alpha": 16.0},
        "data": {**{part: str(folder / f"{part}.jsonl") for part in parts}, "max_length": 512,
                 "columns": {"prompt": "question", "completion": "answer"}},
        "train": {"steps": STEPS, "documents_per_step": DOCUMENTS, **ARMS[arm]},
        "run": {"dir": str(folder / f"{list(ARMS).index(arm)}-{seed}"), "seed": seed, "eval_every": None,
                "save_every": None},
    }  # fmt: skip
    loss = dualtune.train(config, "cpu").eval_loss
    assert loss is not None
    return loss


def write(losses: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> None:
    import record

    control, arms = losses[CONTROL], dict[str, Any]()
    for arm, found in losses.items():
        arms[arm] = {**ARMS[arm], "eval_loss": found, "mean": statistics.mean(found), "std": statistics.stdev(found)}
        if arm != CONTROL:
            gaps = [loss - other for loss, other in zip(found, control, strict=True)]
            margin = T_95[len(gaps) - 1] * statistics.stdev(gaps) / math.sqrt(len(gaps))
            arms[arm]["minus_control"] = {"mean": statistics.mean(gaps), "margin_95": margin}
    setting = {"steps": STEPS, "documents_per_step": DOCUMENTS, "rank": 8, "seeds": list(seeds), "held_out": HELD_OUT}
    print(record.write("averaging", {**setting, "control": CONTROL, "arms": arms}))


def table(result: Mapping[str, Any]) -> str:
    """Return the rows of docs/averaging.md."""
    lines = ["| | rate | evaluation loss | minus cosine, 95 % interval |", "|---|---|---|---|"]
    for arm, found in result["arms"].items():
        gap = found.get("minus_control")
        shown = f"{gap['mean']:+.4f} ± {gap['margin_95']:.4f}" if gap else ""
        lines.append(f"| {arm} | {found['learning_rate']:g} | {found['mean']:.4f} ± {found['std']:.4f} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
