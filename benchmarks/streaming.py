"""Layer streaming on torch: what it copies, how fast, and what it costs in time, on this CPU.

    python benchmarks/streaming.py [ratios | large [STEPS]]

`ratios`: SmolLM2-135M with random weights in float32, one document of 64 tokens, in each format of the base, by the
plain code. A pass is a forward and a backward pass; processor seconds, each divided by those of the resident run in the
same round, medians. On a CPU host and device are the same memory, so a copy takes processor time too.

`large`: Mistral-7B's shape with random weights in NF4, trained for STEPS steps (10) of one document of 16 tokens in a
process that may not take more than 8 GiB of private memory (memory.limit, RLIMIT_DATA).

Writes the keys "ratios" and "large" of results/streaming.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import record
from memory_estimate import CONFIGS, one_batch

from dualtune.config.schema import AdapterConfig
from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

FULL = ActivationCheckpointing("all")
SMALL, SMALL_TOKENS, FORMATS, SLOTS, ROUNDS = "SmolLM2-135M", 64, ("none", "nf4", "int8", "affine4"), (1, 2), 3
LARGE, LARGE_TOKENS, LARGE_SLOTS, STEPS, LIMIT_BYTES = "Mistral-7B-Instruct-v0.3", 16, 2, 10, 8 << 30


def main() -> None:
    what = sys.argv[1:2] or ["ratios", "large"]
    if "ratios" in what:
        for figures in of_formats():
            print(json.dumps(figures, indent=2), write("ratios", figures), sep="\n", flush=True)
    if "large" in what:
        for figures in of_large_base(int(sys.argv[2]) if sys.argv[2:] else STEPS):
            print(json.dumps(figures), write("large", figures), sep="\n", flush=True)


def write(key: str, figures: dict[str, Any]) -> Path:
    """Write one key with its origin, and keep the other with its own; an older one has that of the file."""
    path = record.RESULTS / "streaming.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    origin = {name: written[name] for name in ("date", "commit", "machine", "versions") if name in written}
    others = {name: origin | written[name] for name in ("ratios", "large") if name in written and name != key}
    return record.write("streaming", others | {key: record.origin() | figures})


def load(
    model: str, quantization: str, slots: int | None, how: ActivationCheckpointing, kernels: str,
    limit: int | None = None,
) -> Any:  # fmt: skip
    spec = AdapterConfig()
    adapter = AdapterSpec(spec.rank, spec.alpha, spec.dropout, tuple(spec.targets))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[model]))
        request = LoadRequest(
            Path(folder), "float32", quantization, "random", adapter, OptimizerSpec(), seed=1, checkpointing=how,
            resident_layers=slots, memory_limit_bytes=limit, kernels=kernels,
        )  # fmt: skip
        return get_backend("torch", "cpu").load(request)


class Meter:
    """The copies of an engine: how many, and their bytes and seconds."""

    def __init__(self, engine: Any) -> None:
        self.transfers, self.seconds = engine._streamed.transfers, 0.0
        copy = self.transfers._copy

        def timed(pairs: Any) -> None:
            started = time.perf_counter()
            copy(pairs)
            self.seconds += time.perf_counter() - started

        self.transfers._copy = timed
        self.reset()

    def reset(self) -> None:
        self.transfers.num_copies, self.transfers.num_bytes, self.seconds = 0, 0, 0.0

    def read(self) -> dict[str, float]:
        transfers = self.transfers
        return {
            "copies": transfers.num_copies,
            "copied_bytes": transfers.num_bytes,
            "copy_s": self.seconds,
            "gb_per_s": transfers.num_bytes / max(self.seconds, 1e-9) / 1e9,
        }


# --- ratios -----------------------------------------------------------------------------------------------------------


def of_formats() -> Iterator[dict[str, Any]]:
    """Yield the figures after each format."""
    batch = one_batch([SMALL_TOKENS], CONFIGS[SMALL]["vocab_size"])
    found: dict[str, Any] = {}
    for quantization in FORMATS:
        found[quantization] = of_format(quantization, batch)
        yield {"model": SMALL, "tokens": SMALL_TOKENS, "rounds": ROUNDS, "formats": found}


def of_format(quantization: str, batch: Any) -> dict[str, Any]:
    engines = {"resident": load(SMALL, quantization, None, KEEP_ALL, "reference")}
    engines["resident, full"] = load(SMALL, quantization, None, FULL, "reference")
    engines |= {f"{slots} layers": load(SMALL, quantization, slots, FULL, "reference") for slots in SLOTS}
    meters = {name: Meter(engine) for name, engine in engines.items() if engine._streamed}
    for engine in engines.values():
        processor_s(engine, batch)  # fills the slots
    rounds = [{name: processor_s(engine, batch) for name, engine in engines.items()} for _ in range(ROUNDS)]
    settings: dict[str, Any] = {
        name: {
            "processor_s": median(each[name] for each in rounds),
            "over_resident": median(each[name] / each["resident"] for each in rounds),
            "over_resident_full": median(each[name] / each["resident, full"] for each in rounds),
        }
        for name in engines
    }
    for name, meter in meters.items():
        meter.reset()
        processor_s(engines[name], batch)
        settings[name] |= dict(engines[name].description.streaming) | {"a_pass": meter.read()}
    return settings


def processor_s(engine: Any, batch: Any) -> float:
    """Of a forward and a backward pass."""
    started = time.process_time()
    engine.forward_backward(batch, divisor=batch.num_targets)
    return time.process_time() - started


# --- a large base -----------------------------------------------------------------------------------------------------


def of_large_base(num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield the figures after each step."""
    started = time.perf_counter()
    engine = load(LARGE, "nf4", LARGE_SLOTS, FULL, "auto", LIMIT_BYTES)
    load_s, meter = time.perf_counter() - started, Meter(engine)
    print(f"loaded in {load_s:.0f} s", file=sys.stderr, flush=True)
    batch = one_batch([LARGE_TOKENS], CONFIGS[LARGE]["vocab_size"])
    case = {
        "model": LARGE, "tokens": LARGE_TOKENS, "dtype": "float32", "quantization": "nf4", "limit_bytes": LIMIT_BYTES,
        "num_parameters": engine.description.num_parameters, "streaming": engine.description.streaming,
        "kernels": engine.description.kernels, "load_s": load_s,
    }  # fmt: skip
    steps: list[dict[str, float]] = []
    for _ in range(num_steps):
        steps.append(one_step(engine, batch, meter))
        print(json.dumps(steps[-1]), file=sys.stderr, flush=True)
        seconds = median(step["seconds"] for step in steps)
        yield case | {"median_step_s": seconds, "private_bytes": private_bytes(), "steps": steps}


def one_step(engine: Any, batch: Any, meter: Meter) -> dict[str, float]:
    meter.reset()
    started, processor = time.perf_counter(), time.process_time()
    engine.forward_backward(batch, divisor=batch.num_targets)
    loss = float(engine.optim_step(lr=1e-3, max_grad_norm=1.0).loss)
    clocks = {"seconds": time.perf_counter() - started, "processor_s": time.process_time() - processor}
    return {"loss": loss} | clocks | meter.read()


def private_bytes() -> dict[str, int]:
    """What RLIMIT_DATA counts, and the largest resident size so far."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[0] in ("VmData:", "VmHWM:")}


if __name__ == "__main__":
    main()
