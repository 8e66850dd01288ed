"""What fine-tuning is worth on a real model: SmolLM2-135M-Instruct, two tasks, several seeds, one evaluation for all.

    python benchmarks/quality.py [--shared ../shared] [--tasks wikisql] [--arms lora,trl] [--seeds 1 2 3] [--threads 1]
    python benchmarks/quality.py --tasks wikisql_short
    python benchmarks/quality.py --padding  # what mlx-lm's target in the padding does to the loss of its first step
    python benchmarks/quality.py --table    # writes docs/quality.md's tables from the recorded result

Sides with a PEER's name train in the peer's own program (peers_sides.py); all others are `dualtune train`. With equal
settings a side has the same weights, initial adapter, rows in the same order, AdamW, constant rate and clipping. Each
adapter is then measured by `dualtune eval` on the same held-out rows, whoever has trained it: the loss of the answers'
tokens, and a share of right answers, which is that of exactly reproduced queries (WikiSQL) or of answers in the format
that GSM8K asks for. A run that is recorded is not made again, unless with --again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import page_tables
import psutil
import record
from peers import OPTIMIZER
from peers_inputs import SPEC, save_adapter, shuffled_batches, tokens_of, unshuffled, write_lines
from peers_settings import hf, python_of

from dualtune.config import Config, parse_config
from dualtune.data.documents import Data, Documents
from dualtune.data.order import Order
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.doctor.bench.intervals import Interval, interval, paired
from dualtune.model.gguf import model_from_gguf
from dualtune.model.package import fetch_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quality.md"
SIDES = Path(__file__).with_name("peers_sides.py")
STEPS, DOCUMENTS = 40, 4  # documents of a step
PEERS: dict[str, dict[str, Any]] = {  # settings in the peer's words: float32 throughout, nothing recomputed
    "trl": {
        "model": {"dtype": "float32"},
        "arguments": {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": DOCUMENTS},
    },
    "hf_peft": hf(DOCUMENTS, "sdpa", dtype="float32"),
    "mlx_lm": {"dtype": "float32"},
}
PREDICTIVE = {"enabled": True, "warmup_steps": 12, "full_steps": 8, "gate": "none"}  # for runs as short as these
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# What an arm changes in the config of equal settings.
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "lora": {},
    "full": {"adapter": {"method": "full"}, "train": {"learning_rate": 1e-4}},
    "nf4": {"model": {"quantization": "nf4"}},
    "int8": {"model": {"quantization": "int8"}},
    "cosine": {"train": {"schedule": "cosine"}},
    "schedule_free": {"train": {"schedule": "schedule_free"}},
    "average": {"train": {"average": "tail"}},
    "conservative": {"hybrid": {**PREDICTIVE, "preset": "conservative"}},
    "balanced": {"hybrid": {**PREDICTIVE, "preset": "balanced"}},
    "aggressive": {"hybrid": {**PREDICTIVE, "preset": "aggressive"}},
    "lora-3e-4": {"train": {"learning_rate": 3e-4}},
    "lora-3e-3": {"train": {"learning_rate": 3e-3}},
    "full-3e-4": {"adapter": {"method": "full"}, "train": {"learning_rate": 3e-4}},
    # Computed in bfloat16, with its masters in float32 and without.
    "full-bf16": {
        "adapter": {"method": "full", "master_weights": "bfloat16"},
        "model": {"dtype": "bfloat16"},
        "train": {"learning_rate": 1e-4},
    },
    "full-bf16-masters": {
        "adapter": {"method": "full"},
        "model": {"dtype": "bfloat16"},
        "train": {"learning_rate": 1e-4},
    },
    # As many weights as seven modules of rank 16 have.
    "attention": {"adapter": {"rank": 42, "alpha": 84, "targets": list(ATTENTION)}},
    "rank-4": {"adapter": {"rank": 4, "alpha": 8}},
    "rank-64": {"adapter": {"rank": 64, "alpha": 128}},
    "rank_pattern": {  # as many weights as rank 16, at the same scale
        "adapter": {
            "rank_pattern": {name: 6 if name in ATTENTION else 22 for name in SPEC.targets},
            "alpha_pattern": {name: 12 if name in ATTENTION else 44 for name in SPEC.targets},
        }
    },
    "dora": {"adapter": {"method": "dora"}},
    "pissa": {"adapter": {"init": "pissa"}},
    "olora": {"adapter": {"init": "olora"}},
    "pissa-2e-4": {"adapter": {"init": "pissa"}, "train": {"learning_rate": 2e-4}},
    "olora-2e-4": {"adapter": {"init": "olora"}, "train": {"learning_rate": 2e-4}},
    "lora_plus": {"train": {"learning_rate": 3e-4, "lora_plus_ratio": 16.0}},
}
SHORT_ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "mlx": {},
    "torch": {},
    "mlx-affine4": {"model": {"quantization": "affine4"}},
    "mlx-affine8": {"model": {"quantization": "affine8"}},
}
ARMS |= SHORT_ARMS


@dataclass(frozen=True, slots=True)
class Task:
    """Rows of ../shared as prompts and completions, and what makes an answer right."""

    train: str
    held_out: str
    num_held_out: int
    max_length: int
    right: str  # the key of the share of right answers in what `dualtune eval --json` prints
    options: tuple[str, ...]  # of `dualtune eval`
    control: str = "lora"  # what the other arms are compared with
    steps: int = STEPS
    is_of_mlx: bool = False  # what mlx-lm does holds for all arms: its order, and no clipping

    @property
    def arms(self) -> list[str]:
        return (
            ["mlx_lm", *SHORT_ARMS]
            if self.is_of_mlx
            else ["trl", "hf_peft", *(arm for arm in ARMS if arm not in SHORT_ARMS)]
        )

    def rows(self, path: Path, start: int, stop: int) -> list[dict[str, str]]:
        with path.open(encoding="utf-8") as file:
            return [self._row(json.loads(line)) for line in islice(file, start, stop)]

    @staticmethod
    def _row(row: Mapping[str, str]) -> dict[str, str]:
        if "question" in row:
            return {"prompt": f"{row['question']}\n", "completion": row["answer"]}
        prompt, completion = row["text"].split("\nA:")
        return {"prompt": f"{prompt}\nA:", "completion": completion}


TASKS = {
    "wikisql": Task("wikisql/train.jsonl", "wikisql/valid.jsonl", 60, 256, "exact_match", ("--exact-match",)),
    "gsm8k": Task(
        "gsm8k/train.jsonl", "gsm8k/train.jsonl", 40, 512, "right",
        ("--answer-pattern", r"(####) *[-$0-9]", "--limit", "20", "--max-tokens", "200"),
    ),
    "wikisql_short": Task(
        "wikisql/train.jsonl", "wikisql/valid.jsonl", 60, 256, "exact_match", ("--exact-match",),
        control="mlx", steps=10, is_of_mlx=True,
    ),
}  # fmt: skip


class Bench:
    """One task, in one folder."""

    def __init__(self, args: argparse.Namespace, task: str, folder: Path) -> None:
        self.args, self.name, self.task, self.folder = args, task, TASKS[task], folder
        self.model = model_from_gguf(fetch_model())
        data, num_trained = args.shared / "data", self.task.steps * DOCUMENTS
        # GSM8K's file is one: what is held out lies behind what three seeds could train on.
        start = 5000 if self.task.train == self.task.held_out else 0
        self.train = self._write("train", self.task.rows(data / self.task.train, 0, num_trained))
        held_out = self.task.rows(data / self.task.held_out, start, start + self.task.num_held_out)
        self.held_out = self._write("held-out", held_out)

    def _write(self, name: str, rows: list[dict[str, str]]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def config(self, arm: str, seed: int) -> dict[str, Any]:
        settings: dict[str, dict[str, Any]] = {
            "model": {"name": str(self.model), "dtype": "float32"},
            "adapter": {"rank": SPEC.rank, "alpha": SPEC.alpha, "dropout": 0.0, "targets": list(SPEC.targets)},
            "data": {"train": str(self.train), "eval": 0, "max_length": self.task.max_length,
                     "template": "none"},
            "train": {"steps": self.task.steps, "documents_per_step": DOCUMENTS, "learning_rate": OPTIMIZER["lr"],
                      "schedule": "constant", "warmup": 0.0, "weight_decay": OPTIMIZER["weight_decay"],
                      "max_grad_norm": None if self.task.is_of_mlx else OPTIMIZER["max_grad_norm"]},
            "run": {"dir": str(self.folder / f"{arm}-{seed}"), "seed": seed, "log_every": 1, "eval_every": None,
                    "save_every": None},
        }  # fmt: skip
        changed = ARMS.get(arm, {})
        if changed.get("adapter", {}).get("method") == "full":  # has neither rank nor targets
            settings["adapter"] = {}
        return {name: settings.get(name, {}) | changed.get(name, {}) for name in {**settings, **changed}}

    def base(self, arm: str) -> dict[str, Any]:
        """Measure the model before tuning, as this arm stores its weights."""
        config = self.folder / "base.json"
        config.write_text(json.dumps(self.config(arm, 1)))
        return self.measured(config, "--base")

    def run(self, arm: str, seed: int) -> dict[str, Any]:
        """Train a side and measure what it has learned."""
        settings = self.config(arm, seed)
        if self.task.is_of_mlx and arm not in PEERS:
            settings["data"]["train"] = str(self._in_order_of_mlx_lm(settings))
        if "adapter" not in ARMS.get(arm, {}):
            settings["adapter"]["init_from"] = str(self._initial(seed))
        config = self.folder / f"{arm}-{seed}.json"
        config.write_text(json.dumps(settings))
        run_dir = Path(settings["run"]["dir"])
        if arm in PEERS:
            losses = self._peer(arm, seed, run_dir)
            return {"losses": losses} | self.measured(config, "--adapter", run_dir / "adapter")
        self._call(["train", config], "mlx" if arm.startswith("mlx") else "cpu")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return {"losses": [row["loss"] for row in rows if "loss" in row]} | self.measured(config)

    def _initial(self, seed: int) -> Path:
        """Return the adapter that all sides of a seed start from."""
        shape = json.loads((self.model / "config.json").read_text())
        return save_adapter(self.folder / f"initial-{seed}", shape, seed)

    def documents(self, config: Config) -> Documents:
        """Return what dualtune makes of the rows of training."""
        return Data(config).train_and_eval(Tokenizer(self.model, config.data.template))[0]

    def _in_order_of_mlx_lm(self, settings: dict[str, Any]) -> Path:
        """Return the rows of training in a file from which dualtune takes the steps that mlx-lm takes."""
        config = parse_config(json.dumps(settings))
        documents = self.documents(config)
        rows = self.train.read_text(encoding="utf-8").splitlines(keepends=True)
        order = shuffled_batches(np.zeros(len(documents)), DOCUMENTS, config.run.seed)
        return write_lines(Path(f"{settings['run']['dir']}.jsonl"), unshuffled([rows[i] for i in order], config))

    def _peer(self, peer: str, seed: int, run_dir: Path) -> list[float]:
        """Train in the peer's program on the documents that dualtune makes of the rows, in dualtune's order."""
        run_dir.mkdir()
        config = parse_config(json.dumps(self.config(peer, seed)))
        documents = self.documents(config)
        order = Order(config, documents.lengths)
        job = {
            "model": str(self.model), "adapter": str(self._initial(seed)),
            "documents": str(write_lines(run_dir / "documents.jsonl", tokens_of(documents))),
            "documents_per_step": DOCUMENTS, "steps": self.task.steps,
            "order": [int(i) for step in range(order.num_steps) for i in order.step(step).documents],
            "seed": seed, "optimizer": OPTIMIZER, "quantization": "none", "device": "cpu", "settings": PEERS[peer],
            "scratch": str(run_dir), "result": str(run_dir / "result.json"), "save": str(run_dir / "adapter"),
        }  # fmt: skip
        (run_dir / "job.json").write_text(json.dumps(job))
        python = python_of(peer, self.args.envs)
        if python is None:
            raise SystemExit(f"{peer} is not installed; to create its environment: peers.py --make-envs --peers {peer}")
        subprocess.run([python, SIDES, peer, run_dir / "job.json"], check=True, stdout=sys.stderr)
        return json.loads((run_dir / "result.json").read_text())["losses"]

    def measured(self, config: Path, *what: Any) -> dict[str, Any]:
        options = ["--data", self.held_out, *self.task.options, "--no-leaks", "--json"]
        result = json.loads(self._call(["eval", config, *what, *options]))
        return {"loss": result["loss"], "right": result[self.task.right]}

    def _call(self, command: list[Any], platform: str = "cpu") -> str:
        words = [sys.executable, "-m", "dualtune.cli.main", *map(str, command), "--platform", platform]
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "peers", help="environments of peers.py")
    parser.add_argument("--tasks", default="wikisql,gsm8k")
    parser.add_argument("--arms", help="default: all of the task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument("--again", action="store_true", help="make runs anew that are recorded")
    parser.add_argument("--padding", action="store_true", help="measure the first loss of mlx-lm with and without it")
    parser.add_argument("--table", action="store_true", help="write the tables of the recorded result")
    args = parser.parse_args()
    if args.table:
        return print(page_tables.write(PAGE, tables(record.runs("quality"))))
    args.shared, args.envs = args.shared.resolve(), args.envs.resolve()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if args.padding:
        with tempfile.TemporaryDirectory() as name:
            figures = first_losses(Bench(args, "wikisql_short", Path(name)), args.seeds[0])
        key = f"wikisql_short/first_step/{args.seeds[0]}"
        return print(record.add_run("quality", key, figures, steps=STEPS, documents_per_step=DOCUMENTS))
    for task in args.tasks.split(","):
        with tempfile.TemporaryDirectory() as name:
            run_all(Bench(args, task, Path(name)))
    return None


def run_all(bench: Bench) -> None:
    """Measure all arms of a seed, then those of the next, so that what is recorded is always comparable."""
    args = bench.args
    for seed in args.seeds:
        for arm in args.arms.split(",") if args.arms else bench.task.arms:
            if seed == args.seeds[0] and (
                "model" in ARMS.get(arm, {}) or arm == bench.task.control
            ):  # a base of its own
                note(f"{bench.name}/{arm}/base", lambda arm=arm: bench.base(arm), args.again)
            note(f"{bench.name}/{arm}/{seed}", lambda arm=arm, seed=seed: bench.run(arm, seed), args.again)


def note(key: str, measure: Callable[[], dict[str, Any]], again: bool) -> None:
    """Record a measurement beside those that are there, with its own date and commit."""
    if key in record.runs("quality") and not again:
        return
    figures = measure()
    print(key, figures["loss"], figures["right"], file=sys.stderr, flush=True)
    record.add_run("quality", key, figures, steps=STEPS, documents_per_step=DOCUMENTS)


def first_losses(bench: Bench, seed: int) -> dict[str, float]:
    """Return mlx-lm's loss of the first step as it is, and without the target behind each row."""
    import mlx.core as mx
    from mlx_lm.tuner.datasets import CacheDataset
    from mlx_lm.tuner.trainer import default_loss, iterate_batches
    from peers_sides import Tokenized, mlx_lm_model

    config = parse_config(json.dumps(bench.config("mlx_lm", seed)))
    model = mlx_lm_model(str(bench.model), "float32")
    rows = CacheDataset(Tokenized([json.loads(line) for line in tokens_of(bench.documents(config))]))
    np.random.seed(seed)
    tokens_BT, spans_B2 = next(iterate_batches(rows, DOCUMENTS, config.data.max_length))
    with_padding, _ = default_loss(model, tokens_BT, spans_B2)
    without, _ = default_loss(model, tokens_BT, spans_B2 - mx.array([[0, 1]]))
    return {"mlx_lm": with_padding.item(), "mlx_lm_without_padding": without.item()}


def tables(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a table for each task that has runs."""
    return {task: table(task, runs) for task in TASKS if any(key.startswith(f"{task}/") for key in runs)}


def table(task: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the means of each arm, and its mean difference to the control over the same seeds with a 95 % interval."""
    share = "exactly right" if TASKS[task].right == "exact_match" else "in the format"
    named = TASKS[task].control
    header = ["side", "seeds", "held-out loss", f"minus `{named}`", share, f"minus `{named}`"]
    rows: list[list[str]] = []
    for arm in [*ARMS, *PEERS]:
        if base := runs.get(f"{task}/{arm}/base"):
            rows.append([f"base of `{arm}`, before", "", f"{base['loss']:.4f}", "", f"{base['right']:.1%}", ""])
        if seeds := [key.split("/")[2] for key in runs if key.startswith(f"{task}/{arm}/") and key[-4:] != "base"]:
            cells = [f"`{arm}`", str(len(seeds))]
            for figure, how in (("loss", "{:.4f}"), ("right", "{:.1%}")):
                mine, control = ([runs[f"{task}/{a}/{seed}"][figure] for seed in seeds] for a in (arm, named))
                cells += [how.format(interval(mine).mean), "" if arm == named else shown(paired(mine, control), how)]
            rows.append(cells)
    return page_tables.table(header, rows)


def shown(difference: Interval, how: str) -> str:
    signed = how.replace(":", ":+")
    margin = "" if difference.margin is None else f" ± {how.format(difference.margin)}"
    return signed.format(difference.mean) + margin


if __name__ == "__main__":
    main()
