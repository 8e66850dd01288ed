"""The cost of data: tokenizing compared to TRL, how full packed rows are, whether training waits, and a million rows.

    python benchmarks/data.py --shared ../shared [--peer-python PATH] [--pairs 3] [--repeat 20] [--rows 1000000]
                              [--parts rate,fill,loader,million]

rate     rows per second from a .jsonl file to tokenized and packed rows: dualtune, TRL at its defaults, and TRL with a
         process per core, in turns; each in a fresh process with empty caches. Needs --peer-python, the interpreter of
         an environment with trl and datasets.
fill     the share of the micro-batches' cells that hold a token, over one epoch.
loader   how long the training loop waits for batches: steps of 2048 tokens, the shape of SmolLM2-135M on the CPU.
million  the first and the second start with a million rows: seconds, and memory (Linux).

--shared has the rows of GSM8K, WikiSQL and ShareGPT and the tokenizer of SmolLM2 (every part uses them). Repeated rows
are made distinct by a number. Parts that do not run keep their old result; each has its own date, commit and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import record
from checkpoint_overhead import SHAPE
from data_peers import MAX_LENGTH

import dualtune.train.run as train_run
from dualtune.config import Config, parse_config
from dualtune.data.batches import Ahead, micro_batches
from dualtune.data.documents import Data, Documents
from dualtune.data.order import Order
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.choose import choose, open_backend
from dualtune.train.evaluation import layout_of

PEERS = Path(__file__).with_name("data_peers.py")
GSM8K = "data/gsm8k/train.jsonl"
TOKENIZER = "tokenizers/smollm2"
SETS: dict[str, dict[str, Any]] = {
    "gsm8k": {"data.train": GSM8K, "data.columns": {"prompt": "question", "completion": "answer"}},
    "wikisql": {"data.train": "data/wikisql/train.jsonl"},
    "sharegpt": {"data.train": "data/misc/sharegpt_conversations.json"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, micro-batches of 8192": {"train.micro_batch_tokens": 8192},
    "unpacked": {"data.packing": False},
    "unpacked, micro-batches of 8192": {"data.packing": False, "train.micro_batch_tokens": 8192},
}
LOADER_STEPS, LOADER_TOKENS = 6, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each side")
    parser.add_argument("--repeat", type=int, default=20, help="copies of GSM8K for the rate")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    args.shared = args.shared.resolve()
    parts = record.runs("data", "parts")
    for name in args.parts.split(","):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["DUALTUNE_CACHE"] = f"{folder}/cache"
            parts[name] = record.origin() | PARTS[name](args, Path(folder))
        print(json.dumps({name: parts[name]}, indent=2), record.write("data", {"parts": parts}), sep="\n")


# --- rate ---


def rate(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if args.peer_python is None:
        raise SystemExit("rate needs --peer-python: the interpreter of an environment with trl and datasets")
    rows, tokenizer = folder / "rows.jsonl", args.shared / TOKENIZER
    num_rows = args.repeat * sum(1 for _ in (args.shared / GSM8K).open())
    write_rows(rows, args.shared, num_rows, as_messages=True)
    cores = str(os.cpu_count())
    commands = {
        "dualtune": [sys.executable, PEERS, "dualtune", rows, tokenizer],
        "trl_default": [args.peer_python, PEERS, "trl", rows, tokenizer],
        "trl_best": [args.peer_python, PEERS, "trl", rows, tokenizer, cores],
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for turn in range(args.pairs):
        for name in list(commands)[:: -1 if turn % 2 else 1]:  # there and back: a drift of the machine hits all alike
            found[name].append(child(commands[name], folder / "caches"))
            shutil.rmtree(folder / "caches")
    seconds = {name: [result.pop("seconds") for result in results] for name, results in found.items()}
    arrays = [result.pop("seconds_with_arrays") for result in found["dualtune"]]
    # Of sides measured one after the other: what else the machine does changes from turn to turn.
    turns = {
        f"{name}_over_dualtune": [a / b for a, b in zip(seconds[name], seconds["dualtune"], strict=True)]
        for name in ("trl_default", "trl_best")
    }
    return {
        "rows": num_rows,
        "max_length": MAX_LENGTH,
        "trl_best_is": f"dataset_num_proc={cores}",
        "seconds": seconds | {"dualtune_with_every_batch_made": arrays},
        "median_rows_per_s": {name: num_rows / statistics.median(times) for name, times in seconds.items()},
        "ratios": turns,
        "median_ratio": {name: statistics.median(ratios) for name, ratios in turns.items()},
        "made": {name: results[0] for name, results in found.items()},
    }


# --- fill ---


def fill(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = args.shared / TOKENIZER
    figures: dict[str, Any] = {}
    for name, settings in SETS.items():
        here = settings | {"data.train": args.shared / settings["data.train"], "data.eval": 0, "train.epochs": 1}
        documents, _ = Data(configure(model, here)).train_and_eval(Tokenizer(model))
        figures[name] = {
            "documents": len(documents),
            "tokens": documents.num_tokens,
            "trained_tokens": documents.num_targets,
        } | {label: epoch(configure(model, here | changes), documents) for label, changes in LAYOUTS.items()}
    return figures


def epoch(config: Config, documents: Documents) -> dict[str, Any]:
    """Counted on the arrays that the engine gets."""
    order, layout = Order(config, documents.lengths), layout_of(config)
    tokens = cells = count = 0
    shapes: set[tuple[int, ...]] = set()
    for step in range(order.num_steps):
        for batch in micro_batches(documents, order.step(step).documents.tolist(), layout, seed=0, step=step):
            tokens += int((batch.segments_BT > 0).sum())
            cells += batch.tokens_BT.size
            count += 1
            shapes.add(batch.tokens_BT.shape)
    return {"fill": tokens / cells, "steps": order.num_steps, "micro_batches": count, "shapes": len(shapes)}


# --- loader ---


class Timed(Ahead[Any]):
    """Notes when the loop asks for a step, how long it waits for it, and how long it takes to make one."""

    asked: list[float]
    waited: list[float]
    made: list[float]

    def __init__(self, make: Callable[[int], Any], end: int) -> None:
        super().__init__(self._timed(make), end)
        Timed.asked, Timed.waited, Timed.made = [], [], []

    def __call__(self, step: int) -> Any:
        began = time.perf_counter()
        batches = super().__call__(step)
        self.asked.append(began)
        self.waited.append(time.perf_counter() - began)
        return batches

    def _timed(self, make: Callable[[int], Any]) -> Callable[[int], Any]:
        def timed(step: int) -> Any:
            began = time.perf_counter()
            batches = make(step)
            self.made.append(time.perf_counter() - began)
            return batches

        return timed


def loader(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = folder / "model"
    shutil.copytree(args.shared / TOKENIZER, model)
    (model / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SHAPE)
    )
    settings = SETS["gsm8k"] | {
        "model.init": "random", "model.dtype": "float32", "data.train": args.shared / GSM8K, "data.eval": 0,
        "train.steps": LOADER_STEPS, "train.tokens_per_step": LOADER_TOKENS, "run.dir": folder / "run",
    }  # fmt: skip
    train_run.Ahead = Timed
    try:
        train_run.run(configure(model, settings), open_backend(choose("cpu")))
    finally:
        train_run.Ahead = Ahead
    # A step lasts until the next one is asked for. The first has nobody who made it ahead.
    spent = Timed.asked[-1] - Timed.asked[1]
    return {
        "model": "SmolLM2-135M shape, random weights, float32, on the CPU",
        "steps": LOADER_STEPS,
        "tokens_per_step": LOADER_TOKENS,
        "median_step_s": statistics.median(np.diff(Timed.asked).tolist()),
        "first_wait_s": Timed.waited[0],
        "longest_later_wait_s": max(Timed.waited[1:]),
        "share_waited": sum(Timed.waited[1:-1]) / spent,
        "share_waited_with_the_first_step": sum(Timed.waited[:-1]) / (Timed.asked[-1] - Timed.asked[0]),
        "median_making_s": statistics.median(Timed.made),
        "longest_making_s": max(Timed.made),
    }


# --- million ---


def million(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows, tokenizer = folder / "rows.jsonl", args.shared / TOKENIZER
    write_rows(rows, args.shared, args.rows)
    command = [sys.executable, PEERS, "start", rows, tokenizer]
    starts = {name: child(command, folder / "caches") for name in ("first_start", "second_start", "third_start")}
    cache = sum(path.stat().st_size for path in (folder / "caches").rglob("*") if path.is_file())
    return {"rows": args.rows, "file_bytes": rows.stat().st_size, "cache_bytes": cache, **starts}


# --- what they share ---


def configure(model: Path, settings: dict[str, Any]) -> Config:
    settings = {"model.name": model, "data.max_length": MAX_LENGTH} | settings
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
    return parse_config("model: {}", overrides=overrides)


def write_rows(path: Path, shared: Path, count: int, *, as_messages: bool = False) -> None:
    """Rows of GSM8K, numbered. As messages, both sides of the comparison take them, and put them into the template."""
    with path.open("w", encoding="utf-8") as file:
        for number, (question, answer) in enumerate(islice(cycle(list(gsm8k(shared))), count)):
            row: dict[str, Any] = {"prompt": f"{number}. {question}", "completion": answer}
            if as_messages:
                roles = {"prompt": "user", "completion": "assistant"}
                row = {key: [{"role": roles[key], "content": text}] for key, text in row.items()}
            file.write(json.dumps(row) + "\n")


def gsm8k(shared: Path) -> Iterator[tuple[str, str]]:
    for line in (shared / GSM8K).open(encoding="utf-8"):
        row = json.loads(line)
        yield row["question"], row["answer"]


def child(command: list[Any], caches: Path) -> dict[str, Any]:
    """What the process prints, how long all of it took, and the most anonymous memory that it was seen to have."""
    environment = os.environ | {
        "DUALTUNE_CACHE": f"{caches}/dualtune",
        "HF_DATASETS_CACHE": f"{caches}/datasets",
        "HF_HUB_OFFLINE": "1",
    }
    caches.mkdir(exist_ok=True)
    began, most = time.perf_counter(), 0
    with subprocess.Popen([*map(str, command)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            most = max(most, anonymous_bytes(process.pid))
            time.sleep(0.05)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}")
    return json.loads(output.splitlines()[-1]) | {
        "process_s": time.perf_counter() - began,
        "peak_anonymous_bytes": most,
    }


def anonymous_bytes(pid: int) -> int:
    """Memory that no file backs; the kernel cannot take it back."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended, or this is no Linux
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


PARTS = {"rate": rate, "fill": fill, "loader": loader, "million": million}

if __name__ == "__main__":
    main()
