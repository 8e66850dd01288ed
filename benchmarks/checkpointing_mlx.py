"""Activation checkpointing on MLX: peak memory and processor time of a micro-batch, by what is recomputed.

    python benchmarks/checkpointing_mlx.py [--model SmolLM2-135M] [--tokens 512] [--rounds 2] [--compiled] [VARIANT …]

A variant is a value of memory.checkpointing: `none`, `remade`, `full`, or `k:N` (the first k layers, N at a time).
`mx.checkpoint` is the alternative that MLX offers: the layers of `full`, each wrapped in it. Weights are random, in
float32. Bytes are those of MLX's allocator above what the engine holds between two micro-batches. Seconds are those of
the process; the variants take turns, so that other work on the machine hits all of them, and the ratio is the median
over the rounds. Every gradient is compared with that of `none`. Writes results/checkpointing_mlx.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import record
from peers_inputs import SHAPES

from dualtune.config.schema import AdapterConfig
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import in_memory
from dualtune.engine.backend import Batch, LoadRequest, get_backend
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.memory.shapes import KNOWN
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune_mlx import checkpointing
from dualtune_mlx.engine import MlxEngine

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
LLAMA_19M = LLAMA | SHAPES["llama-19m"]
CONFIGS = {"llama-19m": LLAMA_19M} | {name.split("/")[1]: dict(config) for name, config in KNOWN.items()}
ALTERNATIVE = "mx.checkpoint"
VARIANTS = ("none", "remade", "15:1", "full", "29:2", ALTERNATIVE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="SmolLM2-135M")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("variants", nargs="*", default=VARIANTS)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    name = f"{args.model}, {args.tokens} tokens, {'compiled' if args.compiled else 'uncompiled'}"
    origin = record.origin()  # now, because the code may change while this runs
    case = origin | {"rounds": args.rounds, "variants": measure(args)}
    cases = record.runs("checkpointing_mlx", "cases")
    cases[name] = case
    print(json.dumps(case, indent=2), record.write("checkpointing_mlx", {"cases": cases}), sep="\n")


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    config = CONFIGS[args.model]
    engine, batch = load(config, compiled=args.compiled), batch_of(args.tokens, config["vocab_size"])
    figures: dict[str, list[tuple[int, float]]] = {name: [] for name in args.variants}
    gradients: dict[str, np.ndarray] = {}
    for _ in range(args.rounds):
        for name in args.variants:
            with recomputing(engine, name):
                if args.compiled:
                    take_step(engine, batch)  # compiles
                peak, seconds, gradients[name] = take_step(engine, batch)
            figures[name].append((peak, seconds))
            print(f"{name:14} {peak / 1e6:7.1f} MB {seconds:6.1f} s", flush=True)
    return {name: summary(name, figures, gradients) for name in args.variants}


def summary(name: str, figures: dict[str, list[tuple[int, float]]], gradients: dict[str, np.ndarray]) -> dict[str, Any]:
    """The largest peak and the median ratio of a variant, compared with `none`, the first one."""
    first = next(iter(figures))
    peak = max(peak for peak, _ in figures[name])
    ratios = [own[1] / base[1] for own, base in zip(figures[name], figures[first], strict=True)]
    return {
        "peak_bytes": peak,
        "peak_ratio": peak / max(peak for peak, _ in figures[first]),
        "processor_seconds": [seconds for _, seconds in figures[name]],
        "time_ratio": statistics.median(ratios),
        "gradient_is_bitwise_equal": bool(np.array_equal(gradients[name], gradients[first])),
    }


def load(config: dict[str, Any], *, compiled: bool) -> MlxEngine:
    """An engine with the config's default adapter, whose B is not zero."""
    defaults = AdapterConfig()
    spec = AdapterSpec(defaults.rank, defaults.alpha, 0.05, tuple(defaults.targets))
    kernels = "fused" if compiled else "auto"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        request = LoadRequest(Path(folder), "float32", "none", "random", spec, OptimizerSpec(), seed=1, kernels=kernels)
        engine = get_backend("mlx", "cpu").load(request)
    rng = np.random.default_rng(0)
    state = engine.adapter_state()
    engine.load_adapter_state({n: rng.normal(0, 0.02, w.shape).astype(np.float32) for n, w in state.items()})
    assert isinstance(engine, MlxEngine)
    return engine


def batch_of(tokens: int, vocab: int) -> Batch:
    document = np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32)
    documents = in_memory([(document, np.ones(tokens, bool))])
    (batch,) = micro_batches(documents, range(1), SequenceLayout(tokens, tokens), seed=0, step=0)
    return batch


@contextmanager
def recomputing(engine: MlxEngine, variant: str) -> Iterator[None]:
    own = checkpointing.recomputed
    if variant == ALTERNATIVE:
        checkpointing.recomputed = lambda function, _: mx.checkpoint(function)
    try:
        engine.set_checkpointing(asked(variant))
        yield
    finally:
        checkpointing.recomputed = own


def asked(variant: str) -> ActivationCheckpointing:
    match variant:
        case "none":
            return KEEP_ALL
        case "remade":
            return ActivationCheckpointing(adapter_inputs=True)
        case "full" | "mx.checkpoint":
            return ActivationCheckpointing("all")
        case _:
            layers, every = variant.split(":")
            return ActivationCheckpointing(int(layers), int(every))


def take_step(engine: Any, batch: Batch) -> tuple[int, float, np.ndarray]:
    """(peak of a micro-batch above what is there before, seconds of the processor, gradient)."""
    engine._grads, engine._loss = mx.zeros_like(engine._params), mx.array(0.0)
    mx.eval(engine._grads, engine._loss, engine._params)
    mx.synchronize()
    mx.clear_cache()  # a buffer from before serves a smaller array too, and counts as what it is
    mx.reset_peak_memory()
    before, began = mx.get_active_memory(), time.process_time()
    engine.forward_backward(batch, divisor=batch.num_targets)
    mx.eval(engine._grads, engine._loss)
    mx.synchronize()
    return mx.get_peak_memory() - before, time.process_time() - began, np.array(engine._grads)


if __name__ == "__main__":
    main()
