"""Attention at a length, forward and backward: ours, the framework's function (sdpa) and eager, on this CPU.

    python benchmarks/attention.py

What `dualtune bench attention` measures, at a reduced size: 4 of Mistral 7B's 32 heads, and on MLX, whose CPU code is
slow, at 2,048 tokens instead of 4,096. Times are processor seconds, which other programs on the machine disturb least.
It says nothing about a GPU. Writes results/attention.json.
"""

from __future__ import annotations

import json
import time

import record

from dualtune.doctor.bench.attention import AttentionShape, time_attention
from dualtune.engine.backend import get_backend

HEADS, KV_HEADS, HEAD_SIZE = 4, 1, 128
TOKENS = {"torch": 4096, "mlx": 2048}
ROUNDS = {"torch": 5, "mlx": 3}


def main() -> None:
    figures = {}
    for name, tokens in TOKENS.items():
        shape = AttentionShape(tokens, HEADS, KV_HEADS, HEAD_SIZE, "float32")
        backend = get_backend(name, "cpu")
        figures[name] = time_attention(backend, shape, rounds=ROUNDS[name], clock=time.process_time)
        print(name, json.dumps(figures[name], indent=2), flush=True)
    size = f"{HEADS} of 32 heads, on a CPU: not the size of the documents, and nothing about a GPU"
    print(record.write("attention", {"reduced_size": size, "seconds_are": "of the processor", **figures}))


if __name__ == "__main__":
    main()
