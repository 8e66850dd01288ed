"""Activation checkpointing on torch: how much memory each value saves, and how much time it takes, on this CPU.

    python benchmarks/checkpointing.py [--quick]

SmolLM2-135M with random weights in float32 (many CPUs emulate bfloat16, which halves the bytes of activations), one
document of 2,048 tokens (`--quick`: 1,024), the adapter of the default config with dropout. Memory is the most that
torch's allocator has handed out during a forward and a backward pass, above what exists between steps. The floor is
weights, adapter, optimizer and one kept input per layer: no checkpointing can go below. Times are processor seconds of
the pass, each divided by that of `none` in the same round, and the medians are reported. Writes the key "torch" of
results/checkpointing.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import memory_storages
import record
from memory_estimate import CONFIGS, load, one_batch

from dualtune.config.schema import AdapterConfig
from dualtune.engine.backend import get_backend
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.memory.estimate import ITEM_BYTES, Ask

MODEL, DTYPE, TOKENS, QUICK_TOKENS = "SmolLM2-135M", "float32", 2048, 1024
ROUNDS = 3
SETTINGS = {
    "none": KEEP_ALL,
    "remade": ActivationCheckpointing(adapter_inputs=True),
    "{layers: 15}": ActivationCheckpointing(15),
    "full": ActivationCheckpointing("all"),
    "full, every: 2": ActivationCheckpointing("all", every=2),
}


def main() -> None:
    tokens = QUICK_TOKENS if "--quick" in sys.argv[1:] else TOKENS
    for figures in measure(tokens):  # written after every round: the last one counts
        print(json.dumps(figures, indent=2), write(figures), sep="\n", flush=True)


def write(figures: dict[str, Any]) -> Path:
    """Write the key "torch", and keep that of the other backend."""
    path = record.RESULTS / "checkpointing.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    others = {key: value for key, value in written.items() if key == "mlx"}
    return record.write("checkpointing", others | {"torch": figures})


def measure(tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the figures after each round."""
    config = CONFIGS[MODEL]
    batch, short = (one_batch([length], config["vocab_size"]) for length in (tokens, 64))
    engine = load_ready(tokens)
    always = sum(memory_storages.found_in(engine, short)[part] for part in ("weights", "adapter", "optimizer"))
    floor = always + config["num_hidden_layers"] * tokens * config["hidden_size"] * ITEM_BYTES[DTYPE]
    case = {"model": MODEL, "dtype": DTYPE, "tokens": tokens, "kernels": engine.description.kernels}
    peaks = {name: peak_bytes(engine, batch, each) for name, each in SETTINGS.items()}
    memory = {name: memory_of(peak, peaks["none"], always, floor) for name, peak in peaks.items()}
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        rounds.append({name: processor_s(engine, batch, each) for name, each in SETTINGS.items()})
        settings = {name: memory[name] | times_of(name, rounds) for name in SETTINGS}
        yield case | {"rounds": len(rounds), "floor_bytes": floor, "settings": settings}


def load_ready(tokens: int) -> Any:
    """Load an engine that has compiled everything and taken a step."""
    config, spec = CONFIGS[MODEL], AdapterConfig()
    asked = Ask("torch", "cpu", "none", DTYPE, spec.rank, spec.targets, tokens, tokens)
    engine = load(get_backend("torch", "cpu"), config, asked, spec)
    for length in (64, 192):  # the second length compiles code for any
        for checkpointing in SETTINGS.values():
            processor_s(engine, one_batch([length], config["vocab_size"]), checkpointing)
    engine.optim_step(lr=0.0, max_grad_norm=None)
    return engine


def memory_of(peak: int, of_none: int, always: int, floor: int) -> dict[str, float]:
    return {
        "peak_above_state_bytes": peak,
        "peak_ratio": peak / of_none,
        "total_bytes": always + peak,
        "total_over_floor": (always + peak) / floor,
    }


def times_of(name: str, rounds: list[dict[str, float]]) -> dict[str, float]:
    return {
        "processor_s": median(each[name] for each in rounds),
        "processor_time_ratio": median(each[name] / each["none"] for each in rounds),
    }


def peak_bytes(engine: Any, batch: Any, checkpointing: ActivationCheckpointing) -> int:
    engine.set_checkpointing(checkpointing)
    peak = memory_storages.peak_of(lambda: engine.forward_backward(batch, divisor=batch.num_targets))
    print(f"{engine.description.checkpointing}: {peak:,} B", file=sys.stderr, flush=True)
    return peak


def processor_s(engine: Any, batch: Any, checkpointing: ActivationCheckpointing) -> float:
    """Of a forward and a backward pass."""
    engine.set_checkpointing(checkpointing)
    started = time.process_time()
    engine.forward_backward(batch, divisor=batch.num_targets)
    return time.process_time() - started


if __name__ == "__main__":
    main()
