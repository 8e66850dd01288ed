"""Compare a training step of this source tree with that of another one, such as a worktree of an earlier commit.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before --name NAME [--pairs 7] [--cases CASE …]

Each case runs in a process of its own for each tree, in pairs, forth and back. A time is the least processor time of a
step in its process, after two steps that compile; the ratio is that of a pair (after / before), and the median of the
ratios is reported. torch on one thread in float32, MLX on its CPU. Writes results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 8192,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
TINY = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "torch packed, dropout": {"backend": "torch", "config": LLAMA, "dropout": 0.05, "tokens": 1024, "steps": 6},
    "torch packed": {"backend": "torch", "config": LLAMA, "dropout": 0.0, "tokens": 1024, "steps": 6},
    "torch affine4": {"backend": "torch", "config": LLAMA, "quantization": "affine4", "tokens": 512, "steps": 6},
    "torch small": {"backend": "torch", "config": TINY, "dropout": 0.05, "tokens": 64, "steps": 30},
    "mlx packed": {"backend": "mlx", "config": TINY, "dropout": 0.0, "tokens": 256, "steps": 6},
    "mlx affine4, dropout": {
        "backend": "mlx", "config": TINY, "quantization": "affine4", "dropout": 0.05, "tokens": 256, "steps": 6
    },
}  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(**CASES[sys.argv[2]])))
        return
    import record

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    cases = {case: compare(case, args.before.resolve(), args.pairs) for case in args.cases}
    before = subprocess.run(
        ["git", "-C", str(args.before), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    figures = {"made_by": "benchmarks/before_after.py", "before": before.stdout.strip(), "pairs": args.pairs}
    print(record.write(args.name, {**figures, "cases": cases}))


def compare(case: str, before: Path, pairs: int) -> dict[str, Any]:
    seconds: dict[Path, list[float]] = {before: [], ROOT: []}
    for number in range(pairs):
        for tree in (before, ROOT) if number % 2 else (ROOT, before):
            seconds[tree].append(_run(tree, case))
    ratios = [after / first for first, after in zip(seconds[before], seconds[ROOT], strict=True)]
    found = {
        "ratio": round(statistics.median(ratios), 4),
        "least": round(min(ratios), 4),
        "most": round(max(ratios), 4),
    }
    print(f"{case}: {found}", flush=True)
    return found


def _run(tree: Path, case: str) -> float:
    path = os.pathsep.join([str(tree), str(tree / "backends")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--one", case]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}, {case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def measure(
    backend: str, config: dict[str, Any], tokens: int, steps: int, dropout: float = 0.0, quantization: str = "none"
) -> float:
    """Return the least processor time of a step of the tree that PYTHONPATH names, in seconds."""
    import numpy as np

    from dualtune.engine.backend import Batch, LoadRequest, get_backend
    from dualtune.model.adapter import AdapterSpec
    from dualtune.model.optimizer import OptimizerSpec

    numbers = np.random.default_rng(0).integers(1, 100, (1, tokens)).astype(np.int32)
    segments = (np.arange(tokens)[None] * 4 // tokens + 1).astype(np.int32)
    positions = (np.arange(tokens)[None] % (tokens // 4)).astype(np.int32)
    batch = Batch(numbers, numbers, segments, positions, numbers.astype(np.uint32) * 77777)
    adapter = AdapterSpec(
        16, 32.0, dropout, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = get_backend(backend, "cpu").load(
            LoadRequest(Path(folder), "float32", quantization, "random", adapter, OptimizerSpec(), seed=0)
        )
        seconds = []
        for _ in range(steps + 2):
            start = time.process_time()
            engine.forward_backward(batch, divisor=batch.num_targets)
            float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
            seconds.append(time.process_time() - start)
    return min(seconds[2:])


if __name__ == "__main__":
    main()
