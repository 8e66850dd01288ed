"""The gain from the fast kernels of the torch backend, and the effect of their sizes: variants of an engine, in turns.

    python benchmarks/fast_pieces.py [--shape llama-19m] [--threads 1] [--rounds 8] [--lengths 100 330] [VARIANT …]

A variant is a list of settings, such as `kernels=reference`, `dropout=0.05`, `method=dora`, `dtype=float32`,
`block=128` (queries of attention), `short=0` (tokens of the longest document that a batch computes with others),
`rows=512` (of a chunk of the loss), or `products=torch` and `products=onednn` (by whom, whatever the CPU has). The
others are compared with the first one. Documents have random lengths between those of --lengths.
Every variant is a separate engine on the same documents; each round takes a step of every variant, forth and back.
Seconds are those of whole steps. The profile is that of the first variant. Writes results/fast_pieces.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from peers_inputs import SHAPES

from dualtune.config.schema import AdapterConfig
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import Documents, in_memory
from dualtune.engine.backend import Backend, Batch, LoadRequest, get_backend
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune_torch.kernels import attention, cross_entropy, products

VARIANTS = (
    "", "kernels=reference", "dropout=0.05", "dtype=float32",
    "block=128", "block=64", "block=512", "rows=128", "rows=512", "rows=682", "rows=1024",
)  # fmt: skip
LENGTHS = (100, 330)  # of the documents, in tokens, about those of GSM8K
NUM_TOKENS = 1720  # about
# What `products` asks of the CPU: whether it has 16 bits, whether oneDNN is faster, whether it has AVX-512.
PRODUCTS: dict[str, tuple[Any, Any, Any]] = {
    "auto": (products.is_native, products.is_faster, products.has_avx512),
    "torch": (lambda dtype: True, lambda: False, lambda: False),
    "onednn": (products.is_native, lambda: True, lambda: True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-19m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs=2, default=LENGTHS, metavar=("LEAST", "MOST"))
    parser.add_argument("variants", nargs="*", default=VARIANTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = record.runs("fast_pieces", "parts")
    with tempfile.TemporaryDirectory() as folder:
        case = [args.shape, f"{args.threads} threads", *["without AVX-512"] * (not products.has_avx512())]
        case += [f"{args.lengths[0]} to {args.lengths[1]} tokens"] * (tuple(args.lengths) != LENGTHS)
        parts[", ".join(case)] = record.origin() | measure(args, Path(folder))
    print(json.dumps(parts, indent=2), record.write("fast_pieces", {"parts": parts}), sep="\n")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    documents, batches = documents_of(args.shape, folder, args.lengths)
    backend = get_backend("torch", "cpu")
    steps = {name: stepper(backend, folder, batches, name) for name in args.variants}
    for step in steps.values():
        step(), step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            seconds[name].append(steps[name]())
    first = args.variants[0]
    profile = backend.profile(steps[first], folder)
    total = sum(profile.seconds.values())
    return {
        "num_tokens": documents.num_tokens,
        "seconds": seconds,
        "median_tokens_per_s": {n: documents.num_tokens / statistics.median(s) for n, s in seconds.items()},
        "median_ratio": {
            name: statistics.median(a / b for a, b in zip(times, seconds[first], strict=True))
            for name, times in seconds.items()
        },
        "profile_of_the_first": {kind: s / total for kind, s in sorted(profile.seconds.items(), key=lambda i: -i[1])},
    }


def documents_of(name: str, folder: Path, lengths: tuple[int, int] = LENGTHS) -> tuple[Documents, list[Batch]]:
    """Write the config of a model of this shape, and return documents for it and their micro-batches."""
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SHAPES[name]
    (folder / "config.json").write_text(json.dumps(shape))
    vocab, number, rng = SHAPES[name]["vocab_size"], 2 * NUM_TOKENS // sum(lengths), np.random.default_rng(0)
    documents = in_memory(
        [(rng.integers(0, vocab, n).astype(np.int32), np.ones(n, bool)) for n in rng.integers(*lengths, number)]
    )
    return documents, micro_batches(documents, range(number), SequenceLayout(2048, 2048), seed=0, step=0)


def stepper(backend: Backend, model: Path, batches: list[Any], variant: str) -> Callable[[], float]:
    """A function that takes one optimizer step and returns its seconds."""
    given = dict(item.split("=") for item in variant.split(",") if item)
    block, short, rows = (
        int(given.pop("block", attention.ATTENTION_BLOCK)),
        int(given.pop("short", attention.SHORT)),
        int(given.pop("rows", cross_entropy.LOSS_ROWS["cpu"])),
    )
    dtype, kernels, dropout = given.pop("dtype", "bfloat16"), given.pop("kernels", "auto"), given.pop("dropout", "0")
    method, library = given.pop("method", "lora"), given.pop("products", "auto")
    if given:
        raise SystemExit(f"variant {variant!r}: unknown settings: {', '.join(given)}")
    defaults = AdapterConfig()
    spec = AdapterSpec(defaults.rank, defaults.alpha, float(dropout), tuple(defaults.targets), method=method)
    engine = backend.load(LoadRequest(model, dtype, "auto", "random", spec, OptimizerSpec(), seed=1, kernels=kernels))
    num_targets = sum(batch.num_targets for batch in batches)

    def step() -> float:
        attention.ATTENTION_BLOCK, attention.SHORT, cross_entropy.LOSS_ROWS["cpu"] = block, short, rows
        products.is_native, products.is_faster, products.has_avx512 = PRODUCTS[library]
        began = time.perf_counter()
        for batch in batches:
            engine.forward_backward(batch, divisor=num_targets)
        float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
        return time.perf_counter() - began

    return step


if __name__ == "__main__":
    main()
