"""Reinforcement learning on a real model: SmolLM2-135M-Instruct learns sums of two-digit numbers by GRPO.

    python benchmarks/grpo.py [--seeds 1 2 3] [--steps 20] [--rate 1e-4] [--samples 16] [--brief 0]
    python benchmarks/grpo.py --task calculator --seeds 1 --steps 10 --samples 8 --prompts 4 --evals 1 --held-out 32

A prompt asks for the sum alone. An answer is rewarded by 1 if its last number is the sum (`number`), and with --brief
by up to that weight if it is as short as a sum (`brief:3`). --prompts prompts a step, --samples answers of up to 12
tokens to each; --held-out others are answered greedily before, during and after.

With --task calculator it is asked for products of two-digit numbers, which it does not know, and may ask a calculator
before it answers (examples/calculator.py, up to 3 answers of 24 tokens), which is rewarded by 0.1 once. The model does
not use it of itself, and what it never does cannot be rewarded. So it is first shown --shown conversations with the
calculator, eight a step at a rate of 5e-4, and reinforcement learning starts from that adapter.

Recorded are the rewards of every step and evaluation, the share of conversations that ask, and the seconds. A seed that
is recorded is not run again, unless with --again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import record

from dualtune.model.gguf import model_from_gguf
from dualtune.model.package import fetch_model

NUM_TRAINED = 1024
SHOWN_RATE = 5e-4
CALCULATOR = Path(__file__).parents[1] / "examples" / "calculator.py"

Pair = tuple[int, int]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["sums", "calculator"], default="sums")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--objective", default="grpo")
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument("--samples", type=int, default=16, help="of each prompt")
    parser.add_argument("--brief", type=float, default=0.0, help="the weight of brevity")
    parser.add_argument("--shown", type=int, default=40, help="conversations with the calculator before")
    parser.add_argument("--evals", type=int, default=4, help="evaluations beside that before the first step")
    parser.add_argument("--held-out", type=int, default=64, help="questions of an evaluation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run seeds anew that are recorded")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for seed in args.seeds:
        key = key_of(args, seed)
        if key not in record.runs("grpo") or args.again:
            with tempfile.TemporaryDirectory() as name:
                figures = measured(Path(name), seed, args)
            print(key, figures["evals"], file=sys.stderr, flush=True)
            record.add_run("grpo", key, figures)


def key_of(args: argparse.Namespace, seed: int) -> str:
    shape = f"{args.objective}/{args.rate:g}/{args.steps}/{args.samples} samples"
    if args.task == "sums":
        prompts = "" if args.prompts == 8 else f"/{args.prompts} prompts"
        return f"{shape}{prompts}/brief {args.brief:g}/{seed}"
    return f"{args.task}/{shape}/{args.prompts} prompts/{args.shown} shown/{seed}"


def measured(folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the rewards of a run."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)  # the held-out ones are the same for all seeds
    held_out, others = pairs[: args.held_out], pairs[args.held_out :]
    drawn = random.Random(seed).sample(others, NUM_TRAINED)
    if args.task == "sums":
        task, row = of_sums(args), of_sum
    else:
        drawn, shown = drawn[: NUM_TRAINED - args.shown], drawn[NUM_TRAINED - args.shown :]
        task, row = with_calculator(folder, seed, shown, args), of_product
    parts = {"train": drawn, "eval": held_out}
    files = {part: rows(folder / f"{part}.jsonl", map(row, numbers)) for part, numbers in parts.items()}
    train(folder / "run", seed, args.rate, {
        "adapter": task.get("adapter", {}), "data": {**files, **task["data"]},
        "train": {"objective": args.objective, "steps": args.steps, "documents_per_step": args.prompts},
        "rollouts": {**task["rollouts"], "samples": args.samples},
        "run": {"eval_every": max(1, args.steps // args.evals)},
    })  # fmt: skip
    rewards = [*task["rollouts"].get("rewards", [])]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps, evals = ([row for row in lines if key in row] for key in ("loss", "eval_loss"))
    of_rewards = ["reward", *([f"reward_{name.partition(':')[0]}" for name in rewards] if len(rewards) > 1 else [])]
    kept = (*of_rewards, "equal_groups", "completion_tokens", "logprob_gap", "step_s")
    return {
        "evals": {str(row["step"]): {key: row[f"eval_{key}"] for key in of_rewards} for row in evals},
        "steps": {key: [round(row[key], 6) for row in steps] for key in kept}
        | ({"asks": shares_that_ask(folder / "run")} if args.task == "calculator" else {}),
    }


def of_sums(args: argparse.Namespace) -> dict[str, Any]:
    rewards = {"number": 1.0} | ({"brief:3": args.brief} if args.brief else {})
    rollouts = {"rewards": [*rewards], "weights": [*rewards.values()], "max_tokens": 12}
    return {"data": {"max_length": 128}, "rollouts": rollouts}


def with_calculator(folder: Path, seed: int, shown: Sequence[Pair], args: argparse.Namespace) -> dict[str, Any]:
    """Show the model a few conversations, and return what makes a run that starts from there."""
    if shown:
        train(folder / "shown", seed, SHOWN_RATE, {
            "data": {"train": rows(folder / "shown.jsonl", map(of_conversation, shown)), "max_length": 256},
            "train": {"objective": "sft", "steps": -(-len(shown) // 8), "documents_per_step": 8}, "run": {},
        })  # fmt: skip
    return {
        "adapter": {"init_from": str(folder / "shown" / "adapter")} if shown else {},
        "data": {"max_length": 256, "format": "prompt"},
        "rollouts": {
            "environment": f"{CALCULATOR}:Calculator", "turns": 3, "stop": ["</calc>"], "max_tokens": 24,
        },
    }  # fmt: skip


def train(run_dir: Path, seed: int, rate: float, sections: dict[str, dict[str, Any]]) -> None:
    """Train the model with these settings, beside those that all runs have."""
    common: dict[str, dict[str, Any]] = {
        "model": {"name": str(model_from_gguf(fetch_model())), "dtype": "float32"},
        "adapter": {"rank": 16, "alpha": 32, "dropout": 0.0},
        "train": {"schedule": "constant", "learning_rate": rate, "warmup": 0.0},
        "run": {"dir": str(run_dir), "seed": seed, "log_every": 1, "save_every": None, "report": False},
    }
    config = {name: common.get(name, {}) | sections.get(name, {}) for name in common | sections}
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "dualtune.cli.main", "train", path, "--platform", "cpu"]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def shares_that_ask(run_dir: Path) -> list[float]:
    """Return for each step the share of its conversations that have asked for anything that can be calculated."""
    asking: dict[int, list[bool]] = {}
    for row in map(json.loads, (run_dir / "rollouts.jsonl").read_text().splitlines()):
        reward = row["rewards"]["environment"]
        asking.setdefault(row["step"], []).append(reward not in (None, 0.0, 1.0))
    return [round(sum(each) / len(each), 6) for _, each in sorted(asking.items())]


def rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def of_sum(numbers: Pair) -> dict[str, Any]:
    a, b = numbers
    return {"prompt": f"What is {a} + {b}? Reply with the number alone.", "completion": str(a + b)}


def of_product(numbers: Pair) -> dict[str, Any]:
    a, b = numbers
    return {"prompt": f"What is {a} * {b}?", "answer": a * b}


def of_conversation(numbers: Pair) -> dict[str, Any]:
    """Return what a conversation with the calculator of the example looks like."""
    a, b = numbers
    tool = runpy.run_path(str(CALCULATOR))["TOOL"]
    said = [f"What is {a} * {b}?\n{tool}", f"<calc>{a} * {b}</calc>", str(a * b), str(a * b)]
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]}


if __name__ == "__main__":
    main()
