"""Activation checkpointing on torch: how much memory each value saves, and how much time it takes, on this CPU.

    python benchmarks/checkpointing.py [--quick]

SmolLM2-135M with random weights in bfloat16, one document of 2,048 tokens (`--quick`: 1,024), the adapter of the
default config with dropout. Memory is the most that torch's allocator has handed out during a forward and a backward
pass, above what exists between steps. The floor is weights, adapter, optimizer and one kept input per layer: no
checkpointing can go below. Times are processor seconds, each divided by that of `none` in the same round; the medians
are reported. Writes the key "torch" of results/checkpointing.json.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import memory_storages
import record
from memory_estimate import CONFIGS, load, one_batch

from dualtune.activation_checkpointing import KEEP_ALL, ActivationCheckpointing
from dualtune.backend import get_backend
from dualtune.config.schema import AdapterConfig
from dualtune.memory.estimate import Ask

MODEL, TOKENS, QUICK_TOKENS, ROUNDS = "SmolLM2-135M", 2048, 1024, 5
SETTINGS = {
    "none": KEEP_ALL,
    "remade": ActivationCheckpointing(remade=True),
    "{layers: 15}": ActivationCheckpointing(15),
    "full": ActivationCheckpointing("all"),
    "full, every: 2": ActivationCheckpointing("all", every=2),
}


def main() -> None:
    tokens = QUICK_TOKENS if "--quick" in sys.argv[1:] else TOKENS
    figures = measure(tokens)
    path = record.RESULTS / "checkpointing.json"
    others = {key: value for key, value in _read(path).items() if key in ("mlx",)}
    print(json.dumps(figures, indent=2), record.write("checkpointing", others | {"torch": figures}), sep="\n")


def measure(tokens: int) -> dict[str, Any]:
    config, spec = CONFIGS[MODEL], AdapterConfig()
    asked = Ask("torch", "cpu", "none", "bfloat16", spec.rank, spec.targets, tokens, tokens)
    engine = load(get_backend("torch", "cpu"), config, asked, spec)
    batch = one_batch([tokens], config["vocab_size"])
    for checkpointing in SETTINGS.values():  # compiles
        processor_s(engine, batch, checkpointing)
    engine.optim_step(lr=0.0, max_grad_norm=None)
    engine.set_checkpointing(KEEP_ALL)
    found = memory_storages.found_in(engine, batch)
    always = sum(found[part] for part in ("weights", "adapter", "optimizer"))
    floor = always + config["num_hidden_layers"] * tokens * config["hidden_size"] * 2
    peaks = {name: peak_bytes(engine, batch, checkpointing) for name, checkpointing in SETTINGS.items()}
    rounds = [{name: processor_s(engine, batch, each) for name, each in SETTINGS.items()} for _ in range(ROUNDS)]
    settings = {
        name: {
            "peak_above_state_bytes": peak,
            "peak_ratio": peak / peaks["none"],
            "total_bytes": always + peak,
            "total_over_floor": (always + peak) / floor,
            "processor_s": median(each[name] for each in rounds),
            "processor_time_ratio": median(each[name] / each["none"] for each in rounds),
        }
        for name, peak in peaks.items()
    }
    case = {"model": MODEL, "dtype": "bfloat16", "tokens": tokens, "rounds": ROUNDS}
    return case | {"kernels": engine.description.kernels, "floor_bytes": floor, "settings": settings}


def peak_bytes(engine: Any, batch: Any, checkpointing: ActivationCheckpointing) -> int:
    engine.set_checkpointing(checkpointing)
    return memory_storages.peak_of(lambda: engine.forward_backward(batch, divisor=batch.num_targets))


def processor_s(engine: Any, batch: Any, checkpointing: ActivationCheckpointing) -> float:
    """Of a forward and a backward pass."""
    engine.set_checkpointing(checkpointing)
    started = time.process_time()
    engine.forward_backward(batch, divisor=batch.num_targets)
    return time.process_time() - started


def _read(path: Any) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
