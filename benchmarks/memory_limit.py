"""Random configs under `memory.limit` on torch's CPU: refused by plan, trained within the limit, or ended with code 8.

    python benchmarks/memory_limit.py [NUMBER]

Each run is a process: two steps of a random Llama on the demo's data, with a limit around what the plan asks for. The
private memory of the process (VmData, which RLIMIT_DATA limits) is sampled every 20 ms. Writes
results/memory_limit.json.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import record

import dualtune
from dualtune.config import load_config
from dualtune.memory.plan import plan_of
from dualtune.memory.shapes import decoder_of

DEMO = Path(dualtune.__file__).parent / "demo"
NUMBER, EXITS = 30, {0: "trained", 2: "refused", 8: "out of memory"}


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else NUMBER
    with tempfile.TemporaryDirectory() as folder:
        runs = [one(random.Random(seed), Path(folder) / str(seed)) for seed in range(number)]
    outcomes = Counter(run["outcome"] for run in runs)
    exceeded = sum(run["peak_bytes"] > run["limit_bytes"] for run in runs)
    figures = {"outcomes": dict(outcomes), "runs_above_their_limit": exceeded, "runs": runs}
    return print(json.dumps(figures["outcomes"]), exceeded, record.write("memory_limit", figures), sep="\n")


def one(rng: random.Random, home: Path) -> dict[str, Any]:
    """Return the outcome of a random config, and the most private memory of its process."""
    model = write_model(rng, home / "model")
    tokens = rng.choice([512, 1024, 2048])
    settings = {
        "model.name": model, "model.init": "random", "run.dir": home / "run", "data.train": DEMO / "data/train.jsonl",
        "data.eval": 0, "train.steps": 2, "train.tokens_per_step": tokens, "data.max_length": 512,
        "train.micro_batch_tokens": tokens,
        "model.quantization": rng.choice(["none", "nf4", "int8", "affine4"]),
        "memory.checkpointing": rng.choice(["auto", "none", "remade", "full"]),
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config({"model": {"name": "m"}, "data": {"train": "d"}}, overrides)
    decoder = decoder_of(json.loads((model / "config.json").read_text()))
    needed = plan_of(config, decoder, "torch", "cpu", 1 << 40).estimate.total_bytes
    limit = int(needed * rng.uniform(0.85, 1.3))
    (home / "c.yaml").write_text("model: {name: m}\ndata: {train: d}\n")
    options = [option for each in (*overrides, f"memory.limit={limit // 10**6}MB") for option in ("--set", each)]
    command = [sys.executable, "-m", "dualtune.cli.main", "train", str(home / "c.yaml"), "--platform", "cpu", *options]
    code, peak, output = watch(command)
    found = {"outcome": EXITS.get(code, f"exit {code}"), "limit_bytes": limit // 10**6 * 10**6, "peak_bytes": peak}
    found |= {"planned_bytes": needed, "cut": "from now on" in output, "settings": overrides[-2:]}
    print(json.dumps(found), file=sys.stderr)
    return found


def write_model(rng: random.Random, path: Path) -> Path:
    """Copy the demo's tokenizer, with a larger shape."""
    shutil.copytree(DEMO / "model", path)
    config = json.loads((path / "config.json").read_text())
    heads = rng.choice([4, 8])
    config |= {
        "hidden_size": 64 * heads, "intermediate_size": 176 * heads, "num_hidden_layers": rng.choice([4, 8, 12]),
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def watch(command: list[str]) -> tuple[int, int, str]:
    """Run a command. Return its exit code, the most private memory in bytes, and what it printed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            peak = max(peak, int(fields["VmData"].split()[0]) * 1024)
        except (OSError, KeyError):
            break
        time.sleep(0.02)
    output = process.communicate()[0]
    return process.returncode, peak, output


if __name__ == "__main__":
    main()
