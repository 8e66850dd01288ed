"""Random configs under `memory.limit`: refused by plan, trained within the limit, or ended with code 8.

    python benchmarks/memory_limit.py [NUMBER]

Each run is a process: two steps of a small random Llama on the demo's data, with a limit around what the plan asks for.
Every fifth one is on MLX, the others on torch, on the CPU. The memory of the process is sampled every 20 ms: on torch
its private memory (VmData), which RLIMIT_DATA limits; on MLX, where nothing does, what of it is resident (RssAnon).
Writes results/memory_limit.json after each run.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record

import dualtune
from dualtune.config import load_config
from dualtune.engine.machine import Budget
from dualtune.engine.memory.plan import plan_of
from dualtune.engine.memory.shapes import decoder_of

DEMO = Path(dualtune.__file__).parent / "demo"
NUMBER, EXITS = 30, {0: "trained", 2: "refused", 8: "out of memory"}


@dataclass(frozen=True, slots=True)
class Side:
    """A backend, what is drawn for it, and the line of /proc/PID/status that counts its memory."""

    backend: str
    platform: str
    counter: str
    heads: tuple[int, ...]
    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    quantizations: tuple[str, ...]


TORCH = Side("torch", "cpu", "VmData", (4, 8), (4, 8), (256, 512, 1024), ("none", "nf4", "int8", "affine4"))
MLX = Side("mlx", "mlx", "RssAnon", (4,), (2, 4), (256, 512), ("none", "int8", "affine4"))


def main() -> None:
    number, runs = int(sys.argv[1]) if len(sys.argv) > 1 else NUMBER, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(number):
            runs.append(one(MLX if seed % 5 == 4 else TORCH, random.Random(seed), Path(folder) / str(seed)))
            print(record.write("memory_limit", figures(runs)), json.dumps(runs[-1]))


def figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the runs so far by backend and outcome, and those that exceeded their limit."""
    outcomes = {side.backend: Counter(run["outcome"] for run in runs if run["backend"] == side.backend)
                for side in (TORCH, MLX)}  # fmt: skip
    exceeded = sum(run["peak_bytes"] > run["limit_bytes"] for run in runs)
    return {"num_runs": len(runs), "outcomes": outcomes, "runs_above_their_limit": exceeded, "runs": list(runs)}


def one(side: Side, rng: random.Random, home: Path) -> dict[str, Any]:
    """Return the outcome of a random config, and the most memory of its process."""
    model = write_model(side, rng, home / "model")
    settings = draw(side, rng) | {"model.name": model, "run.dir": home / "run"}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config({"model": {"name": "m"}, "data": {"train": "d"}}, overrides)
    decoder = decoder_of(json.loads((model / "config.json").read_text()))
    needed = plan_of(config, decoder, side.backend, "cpu", Budget(1 << 40, "")).estimate.total_bytes
    limit = int(needed * rng.uniform(0.8, 1.15)) // 10**6 * 10**6
    (home / "c.yaml").write_text("model: {name: m}\ndata: {train: d}\n")
    options = [option for each in (*overrides, f"memory.limit={limit // 10**6}MB") for option in ("--set", each)]
    command = [sys.executable, "-m", "dualtune.cli.main", "train", str(home / "c.yaml"), "--platform", side.platform]
    code, peak, output = watch([*command, *options], side.counter)
    found = {"backend": side.backend, "outcome": EXITS.get(code, f"exit {code}")}
    if code not in EXITS:
        found["output"] = output[-4000:]
    found |= {"limit_bytes": limit, "peak_bytes": peak, "planned_bytes": needed, "cut": "from now on" in output}
    return found | {"settings": overrides[:4]}


def draw(side: Side, rng: random.Random) -> Mapping[str, Any]:
    """Return the settings of a run; the drawn ones first."""
    tokens = rng.choice(side.tokens)
    return {
        "train.micro_batch_tokens": tokens, "train.tokens_per_step": tokens,
        "model.quantization": rng.choice(side.quantizations),
        "memory.checkpointing": rng.choice(["auto", "none", "adapter_inputs", "full"]),
        "model.init": "random", "data.train": DEMO / "data/train.jsonl", "data.eval": 0, "train.steps": 2,
        "data.max_length": 256,
    }  # fmt: skip


def write_model(side: Side, rng: random.Random, path: Path) -> Path:
    """Copy the demo's tokenizer, with a larger shape."""
    shutil.copytree(DEMO / "model", path)
    config = json.loads((path / "config.json").read_text())
    heads = rng.choice(side.heads)
    config |= {
        "hidden_size": 64 * heads, "intermediate_size": 176 * heads, "num_hidden_layers": rng.choice(side.layers),
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def watch(command: list[str], counter: str) -> tuple[int, int, str]:
    """Run a command. Return its exit code, the most memory in bytes by this counter, and what it printed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            peak = max(peak, int(fields[counter].split()[0]) * 1024)
        except (OSError, KeyError):
            break
        time.sleep(0.02)
    output = process.communicate()[0]
    return process.returncode, peak, output


if __name__ == "__main__":
    main()
