"""The cost of checkpoints: the share of a run spent on saving, and the start of a resumed run compared to a fresh one.

    python benchmarks/checkpoint_overhead.py [--platform cpu|cuda|mlx] [--steps 100] [--tokens 256] [--starts 5]

The model has the shape of SmolLM2-135M with random weights; the adapter has rank 16 on all seven kinds of linear
module, as by default. Saving is timed inside a real run with `run.save_every: 100`. Starts are whole processes, from
exec to the first step's line on standard output, fresh and resumed in turns.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

import dualtune
from dualtune.config import Config, load_config
from dualtune.engine.choose import choose, open_backend
from dualtune.show.run import run
from dualtune.train.hooks import Hook
from dualtune.train.state import checkpoint

DEMO = Path(dualtune.__file__).parent / "demo"
# HuggingFaceTB/SmolLM2-135M, config.json
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "initializer_range": 0.041,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per step")
    parser.add_argument("--starts", type=int, default=5, help="number of fresh starts, and of resumed starts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), args.steps, args.tokens)
        figures = {
            "platform": args.platform,
            "model": "SmolLM2-135M shape, random weights",
            "adapter": "rank 16, seven modules",
            "saving": measure_saving(load_config(config), args.platform),
            "start": measure_starts(config, args.platform, args.starts),
        }
    path = record.write("checkpoint_overhead", figures)
    print(json.dumps(figures, indent=2), path, sep="\n")


def write_config(folder: Path, steps: int, tokens: int) -> Path:
    model = folder / "model"
    shutil.copytree(DEMO / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    shape = json.loads((model / "config.json").read_text()) | SHAPE
    (model / "config.json").write_text(json.dumps(shape))
    settings = {
        "model": {"name": str(model), "init": "random", "dtype": "float32"},
        "data": {"train": str(DEMO / "data" / "train.jsonl"), "eval": 0, "max_length": 256},
        "train": {"steps": steps, "tokens_per_step": tokens},
        "run": {"dir": str(folder / "run"), "save_every": 100, "log_every": 1},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(settings))
    return path


class Clock(Hook):
    """Notes when training begins and ends."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_start(self, info: object) -> None:
        self.began = time.perf_counter()

    def on_end(self) -> None:
        self.ended = time.perf_counter()


def measure_saving(config: Config, platform: str) -> dict[str, object]:
    """One run; the time inside `checkpoint.save` against the time from the first step to the last."""
    spent: list[float] = []
    save = checkpoint.save

    def timed(*args: object) -> Path:
        began = time.perf_counter()
        path = save(*args)  # type: ignore[arg-type]
        spent.append(time.perf_counter() - began)
        return path

    clock = Clock()
    checkpoint.save = timed  # type: ignore[assignment]
    try:
        result = run(config, open_backend(choose(platform)), [clock])
    finally:
        checkpoint.save = save
    [entry, *_] = checkpoint.entries(result.run_dir / "checkpoints")
    total = clock.ended - clock.began
    return {
        "steps": result.num_steps,
        "saves": len(spent),
        "save_s": spent,
        "run_s": total,
        "share": sum(spent) / total,
        "checkpoint_bytes": entry.num_bytes,
        "step_s": (total - sum(spent)) / result.num_steps,
    }


def measure_starts(config: Path, platform: str, count: int) -> dict[str, object]:
    """Seconds from exec to the first step, fresh and resumed in turns."""
    base = config.parent / "halfway"
    overrides = [f"run.dir={base}", "train.steps=4", "run.save_every=2"]
    start(config, platform, overrides, until=f"adapter     {base}")
    for path in (base / "adapter", checkpoint.path_of(base / "checkpoints", 4)):
        shutil.rmtree(path)
    fresh: list[float] = []
    resumed: list[float] = []
    for number in range(count):
        for times, name in ((fresh, f"fresh-{number}"), (resumed, f"resumed-{number}")):
            if times is resumed:
                shutil.copytree(base, config.parent / name)
            times.append(start(config, platform, [*overrides[1:], f"run.dir={config.parent / name}"], until="step "))
    ratios = [after / before for before, after in zip(fresh, resumed, strict=True)]
    return {
        "fresh_s": fresh,
        "resumed_s": resumed,
        "median_ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }


def start(config: Path, platform: str, overrides: list[str], until: str) -> float:
    command = [sys.executable, "-m", "dualtune.cli.main", "train", str(config), "--platform", platform]
    command += [word for override in overrides for word in ("--set", override)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(until):
                elapsed = time.perf_counter() - began
                process.kill()
                return elapsed
    raise SystemExit(f"the run printed no line that starts with {until!r}: {' '.join(command)}")


if __name__ == "__main__":
    main()
