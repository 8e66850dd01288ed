"""How well a small data set trains at the defaults, by the tokens of an optimizer step: decision 0015.

    python benchmarks/small_data.py [--shared ../shared]

Each case trains with 16,384 tokens a step and with `auto` (a hundred steps), one also with a 50th and a 200th of all
tokens. It reports the evaluation loss before and after, and for the demo the share of exact held-out answers. torch on
the CPU in float32, everything else at its default.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import record

import dualtune
from dualtune.train.state.metrics import read_rows

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "dualtune" / "demo"
HELD_OUT = 60  # rows of GSM8K; of the demo the default share
FIFTIETH, TWO_HUNDREDTH = 1842, 460  # of the tokens of 100 rows in three epochs, as `dualtune preview` counts them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["DUALTUNE_CACHE"] = str(Path(name) / "cache")
        for number, (case, base) in enumerate(cases(Path(name), args.shared.resolve())):
            more = (FIFTIETH, TWO_HUNDREDTH) if case == "GSM8K, 100 rows, epochs 3" else ()
            for tokens_per_step in (16384, "auto", *more):
                run_dir = Path(name) / f"run-{number}-{tokens_per_step}"
                found.append(
                    {"case": case, "tokens_per_step": tokens_per_step, **figures(base, tokens_per_step, run_dir)}
                )
                if case.startswith("demo"):
                    found[-1]["exact_match"] = exact_match(run_dir)
                print(json.dumps(found[-1]), flush=True)
    print(record.write("small_data", {"held_out_rows": HELD_OUT, "runs": found}))


def cases(folder: Path, shared: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, config)"""
    demo = {"model": {"name": str(DEMO / "model")}, "data": {"train": str(DEMO / "data" / "train.jsonl")}}
    for epochs in (1, 3):
        yield f"demo, 320 rows, epochs {epochs}", {**demo, "train": {"epochs": epochs}}
    with (shared / "data/gsm8k/train.jsonl").open(encoding="utf-8") as file:
        rows = list(file)
    held_out = folder / "held-out.jsonl"
    held_out.write_text("".join(rows[-HELD_OUT:]), encoding="utf-8")
    for number, epochs in ((100, 1), (100, 3)):
        train = folder / f"train-{number}.jsonl"
        train.write_text("".join(islice(rows, number)), encoding="utf-8")
        config = {
            "model": {"name": str(shared / "models/stories260k")},
            "data": {"train": str(train), "eval": str(held_out), "max_length": 512,
                     "columns": {"prompt": "question", "completion": "answer"}},
            "train": {"epochs": epochs},
        }  # fmt: skip
        yield f"GSM8K, {number} rows, epochs {epochs}", config


def figures(base: dict[str, Any], tokens_per_step: int | str, run_dir: Path) -> dict[str, Any]:
    run = {"dir": str(run_dir), "eval_every": None, "save_every": None}
    config = {**base, "train": {**base["train"], "tokens_per_step": tokens_per_step}, "run": run}
    result = dualtune.train(config, "cpu")
    steps = max(row["step"] for row in read_rows(run_dir / "metrics.jsonl"))
    return {"steps": steps, "eval_loss_before": result.eval_loss_before, "eval_loss": result.eval_loss}


def exact_match(run_dir: Path) -> float:
    command = [sys.executable, "-m", "dualtune", "eval", str(run_dir / "config.yaml"), "--platform", "cpu"]
    done = subprocess.run([*command, "--exact-match", "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["exact_match"]


if __name__ == "__main__":
    main()
