"""The time of a step with LoRA on experts, by how many are active for a token and by how many there are, on a CPU.

    python benchmarks/experts.py [--backend torch] [--tokens 1024] [--rounds 10]

A model of Qwen3-MoE's classes with random weights, four layers of width 256 whose experts are 512 wide, the adapter on
attention and experts. Engines on the same documents take steps in turns, forth and back; a ratio is that of two steps
of one round, so that what else the machine does meets both. If time is proportional to the active experts, each one
more costs the same. Of more experts the optimizer updates more weights, and each computes fewer tokens. Writes
results/experts.json: quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import record
from memory_estimate import one_batch

from dualtune.config.schema import AdapterConfig
from dualtune.engine.backend import Backend, LoadRequest, get_backend
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

VOCAB = 512
BASE = (32, 1)  # experts, active for a token: what the others are compared with
CASES = (BASE, (32, 2), (32, 4), (32, 8), (64, 8), (128, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch", choices=("torch", "mlx"))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    backend = get_backend(args.backend, "cpu")
    batch = one_batch([args.tokens // 4] * 4, VOCAB)
    steps = {case: stepper(backend, batch, *case) for case in CASES}
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in CASES}
    for number in range(args.rounds + 1):
        for case in CASES[:: -1 if number % 2 else 1]:
            seconds[case].append(steps[case]())
    ratios = {  # without the first round, which compiles
        f"{active} of {number}": np.divide(seconds[number, active][1:], seconds[BASE][1:]) for number, active in CASES
    }
    quartiles = {case: np.quantile(values, [0.25, 0.5, 0.75]).round(3).tolist() for case, values in ratios.items()}
    figures = {"tokens": args.tokens, "over_1_of_32": quartiles}
    print(json.dumps(figures), record.add_run("experts", args.backend, figures))


def stepper(backend: Backend, batch: Any, experts: int, active: int) -> Callable[[], float]:
    """Return a function that takes an optimizer step and returns its seconds."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 256,
        "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": experts, "num_experts_per_tok": active,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    spec = AdapterConfig()
    adapter = AdapterSpec(spec.rank, spec.alpha, 0.0, tuple(spec.targets), experts=True)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = backend.load(LoadRequest(Path(folder), "float32", "none", "random", adapter, OptimizerSpec(), seed=1))

    def step() -> float:
        began = time.perf_counter()
        engine.forward_backward(batch, divisor=batch.num_targets)
        float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
        return time.perf_counter() - began

    return step


if __name__ == "__main__":
    main()
