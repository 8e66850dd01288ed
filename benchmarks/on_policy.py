"""Distillation of a system prompt on a real model: SmolLM2-135M-Instruct learns to answer briefly without being told.

    python benchmarks/on_policy.py [--seeds 1 2 3] [--steps 20] [--rate 3e-4] [--top-k 32]

The teacher is the model itself with a system message that asks for one short sentence; the student does not read it.
12 questions a step, an answer of up to 32 tokens to each, of which the student learns the reverse KL divergence to the
teacher at each token. 16 questions are held out. Recorded are the divergence of sampled answers to them before and
after, and the tokens of greedy answers of the base, of the teacher and of the student. A seed that is recorded is not
run again, unless with --again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import record

from dualtune.engine.backend import get_backend
from dualtune.model.gguf import model_from_gguf
from dualtune.model.package import fetch_model
from dualtune.train.generation.batched import continue_all
from dualtune.train.generation.inference import load_model
from dualtune.train.generation.sampling import Sampling

SYSTEM = "Answer every question in one short sentence of at most ten words."
THINGS = ("rain", "the moon", "bread", "a bicycle", "gold", "a river", "sleep", "salt", "a computer", "fire", "music",
          "a tree", "money", "snow", "a bridge", "glass", "a cat", "coffee", "the sun", "paper")  # fmt: skip
QUESTIONS = ("What is {}?", "Why is {} important?", "How would you describe {} to a child?", "Tell me about {}.",
             "What is a good use of {}?", "What do people like about {}?")  # fmt: skip
NUM_HELD_OUT, MAX_TOKENS = 16, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--top-k", type=int, default=32, help="0: of the sampled token alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run seeds anew that are recorded")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for seed in args.seeds:
        key = f"top_k {args.top_k}/{args.rate:g}/{args.steps}/{seed}"
        if key not in record.runs("on_policy") or args.again:
            with tempfile.TemporaryDirectory() as name:
                figures = train(Path(name), seed, args)
            print(key, figures, file=sys.stderr, flush=True)
            record.add_run("on_policy", key, figures)


def train(folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    asked = [question.format(thing) for thing, question in product(THINGS, QUESTIONS)]
    random.Random(0).shuffle(asked)  # the held-out ones are the same for all seeds
    held_out, others = asked[:NUM_HELD_OUT], asked[NUM_HELD_OUT:]
    model = str(model_from_gguf(fetch_model()))
    config = {
        "model": {"name": model, "dtype": "float32"},
        "adapter": {"rank": 16, "alpha": 32, "dropout": 0.0},
        "data": {"train": rows(folder / "train.jsonl", others), "eval": rows(folder / "held-out.jsonl", held_out)},
        "train": {"objective": "on_policy_distill", "steps": args.steps, "documents_per_step": 12,
                  "schedule": "constant", "learning_rate": args.rate, "warmup": 0.0},
        "distill": {"teacher": "base", "teacher_system": SYSTEM, "top_k": args.top_k},
        "rollouts": {"samples": 1, "max_tokens": MAX_TOKENS},
        "run": {"dir": str(folder / "run"), "seed": seed, "log_every": 1, "eval_every": args.steps,
                "save_every": None, "report": False},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "dualtune.cli.main", "train", folder / "config.json", "--platform", "cpu"]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps, evals = ([row for row in lines if key in row] for key in ("loss", "eval_loss"))
    kept = ("loss", "completion_tokens", "cut", "logprob_gap", "step_s")
    return {
        "evals": {str(row["step"]): {key: row[key] for key in ("eval_loss", "eval_completion_tokens", "eval_cut")}
                  for row in evals},
        "greedy_tokens": {"base": answered(model, held_out), "teacher": answered(model, held_out, system=SYSTEM),
                          "student": answered(model, held_out, adapter=folder / "run")},
        "steps": {key: [round(row[key], 6) for row in steps] for key in kept},
    }  # fmt: skip


def rows(path: Path, asked: list[str]) -> str:
    """Write questions as rows of chat. Their answers are never learned."""
    chats = ([{"role": "user", "content": text}, {"role": "assistant", "content": "-"}] for text in asked)
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return str(path)


def answered(name: str, asked: list[str], system: str | None = None, adapter: Path | None = None) -> float:
    """Return the mean number of tokens of greedy answers."""
    model = load_model(get_backend("torch", "cpu"), name, adapter, dtype="float32")
    prompts = [model.tokenizer.encode_prompt(text, system) for text in asked]
    return float(np.mean([each.num_tokens for each in continue_all(model, prompts, Sampling(MAX_TOKENS))]))


if __name__ == "__main__":
    main()
