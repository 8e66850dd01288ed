"""Reinforcement learning on a real model: SmolLM2-135M-Instruct learns sums of two-digit numbers by GRPO.

    python benchmarks/grpo.py [--seeds 1 2 3] [--steps 20] [--rate 1e-4] [--samples 16] [--brief 0]
    python benchmarks/grpo.py --task calculator --seeds 1 --steps 20 --samples 8

A prompt asks for the sum alone. An answer is rewarded by 1 if its last number is the sum (`number`), and with --brief
by up to that weight if it is as short as a sum (`brief:3`). 8 prompts a step, --samples answers of up to 12 tokens to
each; 64 held-out sums are answered greedily before, during and after.

With --task calculator the model may ask a calculator before it answers (examples/calculator.py, up to 3 answers of 24
tokens), which is rewarded by 0.1 once. It is asked for the same sums: of what it never gets right nothing is learned.

Recorded are the rewards of every step and evaluation, and the seconds. A seed that is recorded is not run again, unless
with --again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import record

from dualtune.model.gguf import model_from_gguf
from dualtune.model.package import fetch_model

NUM_TRAINED, NUM_HELD_OUT = 1024, 64
CALCULATOR = Path(__file__).parents[1] / "examples" / "calculator.py"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["sums", "calculator"], default="sums")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--objective", default="grpo")
    parser.add_argument("--samples", type=int, default=16, help="of each prompt")
    parser.add_argument("--brief", type=float, default=0.0, help="the weight of brevity")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run seeds anew that are recorded")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for seed in args.seeds:
        task = "" if args.task == "sums" else f"{args.task}/"
        key = f"{task}{args.objective}/{args.rate:g}/{args.steps}/{args.samples} samples/brief {args.brief:g}/{seed}"
        if key not in record.runs("grpo") or args.again:
            with tempfile.TemporaryDirectory() as name:
                figures = train(Path(name), seed, args)
            print(key, figures["evals"], file=sys.stderr, flush=True)
            record.add_run("grpo", key, figures)


def train(folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)  # the held-out ones are the same for all seeds
    held_out, others = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    drawn = random.Random(seed).sample(others, NUM_TRAINED)
    parts = {"train": ("train.jsonl", drawn), "eval": ("held-out.jsonl", held_out)}
    row = of_sum if args.task == "sums" else to_calculate
    data = {part: rows(folder / name, map(row, numbers)) for part, (name, numbers) in parts.items()}
    data |= {"max_length": 128}
    rewards = {"number": 1.0} | ({"brief:3": args.brief} if args.brief else {})
    rollouts: dict[str, Any] = {"rewards": [*rewards], "weights": [*rewards.values()], "max_tokens": 12}
    if args.task == "calculator":
        data |= {"max_length": 256, "format": "prompt"}
        stops = {"turns": 3, "stop": ["</calc>"], "max_tokens": 24}
        rollouts = {"environment": f"{CALCULATOR}:Calculator", **stops}
    config = {
        "model": {"name": str(model_from_gguf(fetch_model())), "dtype": "float32"},
        "adapter": {"rank": 16, "alpha": 32, "dropout": 0.0},
        "data": data,
        "train": {"objective": args.objective, "steps": args.steps, "documents_per_step": 8, "schedule": "constant",
                  "learning_rate": args.rate, "warmup": 0.0},
        "rollouts": {**rollouts, "samples": args.samples},
        "run": {"dir": str(folder / "run"), "seed": seed, "log_every": 1, "eval_every": max(1, args.steps // 4),
                "save_every": None, "report": False},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "dualtune.cli.main", "train", folder / "config.json", "--platform", "cpu"]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps, evals = ([row for row in lines if key in row] for key in ("loss", "eval_loss"))
    of_rewards = ["reward", *(["reward_number", "reward_brief"] if args.brief else [])]
    kept = (*of_rewards, "equal_groups", "completion_tokens", "logprob_gap", "step_s")
    return {
        "evals": {str(row["step"]): {key: row[f"eval_{key}"] for key in of_rewards} for row in evals},
        "steps": {key: [round(row[key], 6) for row in steps] for key in kept},
    }


def rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def of_sum(numbers: tuple[int, int]) -> dict[str, Any]:
    a, b = numbers
    return {"prompt": f"What is {a} + {b}? Reply with the number alone.", "completion": str(a + b)}


def to_calculate(numbers: tuple[int, int]) -> dict[str, Any]:
    a, b = numbers
    return {"prompt": f"What is {a} + {b}?", "answer": a + b}


if __name__ == "__main__":
    main()
