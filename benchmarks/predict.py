"""The predicted time of a step against the measured one, on this CPU with its own measured limits.

    python benchmarks/predict.py [--rounds 7] [--table] [CASE …]

The prediction is the one that `dualtune bench --predict` makes for a GPU or a Mac; only the limits differ: here they
are measured, one thread, float32: products by their shortest side, copies in memory and in the cache, a compiled
elementwise loop, the call of an operator. No figure of a case is fitted. Every round measures the limits and a step of
every case, forth and back, in seconds of the processor, because the machine has other work; the median of each counts.
Writes results/predict.json; --table writes its table, and predictions for other machines, into results/predict.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read by torch, which is not imported yet

import numpy as np
import page_tables
import record
import torch
from torch.nn import functional

from dualtune.config.schema import AdapterConfig
from dualtune.data.batches import SequenceLayout, micro_batches, step_documents
from dualtune.data.documents import in_memory
from dualtune.engine.backend import Backend, LoadRequest, get_backend
from dualtune.engine.machine import Budget, budget
from dualtune.engine.machines import MachineLimits, limits_for, named
from dualtune.engine.memory.estimate import Ask
from dualtune.engine.memory.plan import make_plan
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.engine.step_time import StepTime, predict
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune_torch.card.costs import EXPONENTIAL
from dualtune_torch.kernels.compiled import compile_function

SMALL, MEDIUM, WIDE = "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
QWEN25, QWEN3 = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B"
LAYOUT = SequenceLayout(2048, 2048)
SEVEN = AdapterConfig().targets
# What is measured of the machine.
SIDES = (16, 48, 64, 128, 256)  # shortest sides of products; beyond the last one the rate counts as full
OTHER_SIDES, WEIGHTS = (576, 1536), 4
IN_CACHE, IN_MEMORY = 1 << 18, 1 << 24  # numbers of an array
CACHE_BYTES = 8 << 20  # an operator with less data than this finds it in the cache of this machine, 32 MiB for 8 cores
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A shape of a model and of a step."""

    model: str
    layers: int
    lengths: tuple[int, ...]
    vocab: int | None = 8192  # None: the model's own
    rank: int = 16
    dropout: float = 0.05
    quantization: str = "none"


CASES = {
    "SmolLM2-135M, 6 layers": Case(SMALL, 6, (200, 150, 250)),
    "the same, many short documents": Case(SMALL, 6, (40,) * 16),
    "the same, one long document": Case(SMALL, 4, (1536,)),
    "the same, rank 64": Case(SMALL, 6, (200, 150, 250), rank=64),
    "TinyLlama width, 4 query heads to one key": Case(WIDE, 2, (256, 200)),
    "Qwen3-0.6B width, norms of heads, no dropout": Case(QWEN3, 3, (200, 200), dropout=0.0),
    "Qwen2.5-0.5B, 1 layer, 151,936 tokens": Case(QWEN25, 1, (160,), vocab=None),
    "SmolLM2-360M width, NF4": Case(MEDIUM, 3, (300,), quantization="nf4"),
    "SmolLM2-360M width, affine4": Case(MEDIUM, 3, (300,), quantization="affine4"),
}
# A step of which nothing but the operator calls takes time.
TINY = Case(SMALL, 4, (16,), vocab=64)
MACHINES = ("h100-80", "h200", "rtx-4090-24", "m4-max-64")
MODELS = ((SMALL, ""), (WIDE, ""), ("meta-llama/Llama-3.2-3B-Instruct", ""), ("mistralai/Mistral-7B-Instruct-v0.3", ""),
          ("meta-llama/Llama-3.1-8B-Instruct", "4 bits"))  # fmt: skip
TINY_WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
NO_LIMITS = MachineLimits("none", {"float32": 1.0}, 1.0, 1.0, None, 0.0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--table", action="store_true", help="write the tables of the recorded result")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    if args.table:
        found = json.loads((record.RESULTS / "predict.json").read_text(encoding="utf-8"))
        print(
            page_tables.write(
                page_tables.RESULTS / "predict.md", {"validated": validated(found), "machines": machines()}
            )
        )
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure({name: CASES[name] for name in args.cases}, args.rounds, Path(folder))
    print(json.dumps(found, indent=2))
    if args.cases == list(CASES):
        print(record.write("predict", found))


def measure(cases: Mapping[str, Case], rounds: int, folder: Path) -> dict[str, Any]:
    backend = get_backend("torch", "cpu")
    steps = {name: stepper(backend, case, folder / str(number)) for number, (name, case) in enumerate(cases.items())}
    for step in steps.values():
        step(), step()
    probes = limit_probes(backend, folder / "tiny")
    seconds: dict[str, list[float]] = {name: [] for name in (*steps, *probes)}
    for number in range(rounds):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            seconds[name].append(steps[name]())
            for probe, run in probes.items():
                seconds[probe].append(run())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    limits = limits_from(medians)
    return {
        "rounds": rounds, "dtype": "float32", "threads": 1, "limits": asdict(limits),
        "cases": {name: compared(case, limits, seconds[name]) for name, case in cases.items()},
    }  # fmt: skip


def compared(case: Case, limits: MachineLimits, seconds: list[float]) -> dict[str, Any]:
    found, measured_s = predicted(case, limits), statistics.median(seconds)
    return {
        "case": asdict(case), "tokens": found.tokens, "predicted_s": found.step_s, "measured_s": measured_s,
        "measured_least_s": min(seconds), "measured_most_s": max(seconds), "ratio": measured_s / found.step_s,
        "parts_s": {part.name: part.seconds for part in found.parts}, "launches": sum(p.launches for p in found.parts),
    }  # fmt: skip


# --- a case -----------------------------------------------------------------------------------------------------------


def config_of(case: Case) -> dict[str, Any]:
    own = dict(KNOWN[case.model])
    return own | {"num_hidden_layers": case.layers, "vocab_size": case.vocab or own["vocab_size"]}


def predicted(case: Case, limits: MachineLimits) -> StepTime:
    longest = max(case.lengths)
    ask = Ask(
        "torch", "cpu", case.quantization, "float32", case.rank, SEVEN, LAYOUT.max_tokens, longest,
        kernels="fused", dropout=case.dropout > 0,
    )  # fmt: skip
    documents = step_documents(np.array(case.lengths), LAYOUT, "the case")
    return predict(decoder_of(config_of(case)), ask, documents, limits)


def stepper(backend: Backend, case: Case, folder: Path, **widths: int) -> Callable[[], float]:
    """Return a function that takes one optimizer step and returns its seconds of the processor."""
    config, rng = config_of(case) | widths, np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tokens = [rng.integers(0, config["vocab_size"], length).astype(np.int32) for length in case.lengths]
    documents = in_memory([(ids, np.ones(len(ids), bool)) for ids in tokens])
    batches = micro_batches(documents, range(len(documents)), LAYOUT, seed=0, step=0)
    spec = AdapterSpec(case.rank, 2.0 * case.rank, case.dropout, SEVEN)
    engine = backend.load(
        LoadRequest(folder, "float32", case.quantization, "random", spec, OptimizerSpec(), seed=1, kernels="fused")
    )
    num_targets = sum(batch.num_targets for batch in batches)

    def step() -> float:
        began = time.process_time()
        for batch in batches:
            engine.forward_backward(batch, divisor=num_targets)
        float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
        return time.process_time() - began

    return step


# --- the limits of this machine ---------------------------------------------------------------------------------------


def limit_probes(backend: Backend, folder: Path) -> dict[str, Callable[[], float]]:
    """Return functions that return the seconds of one unit of work: an operation, a byte, a call."""
    a, b = (torch.randn(IN_CACHE) for _ in range(2))
    gated, big = compile_function(_gated), torch.randn(IN_MEMORY)
    into, small = torch.empty_like(big), torch.empty_like(a)
    probes = {f"side {side}": _products(side) for side in (*SIDES, min(OTHER_SIDES))}
    return probes | {
        "memory": _timed(lambda: into.copy_(big), 2 * big.nbytes),
        "cache": _timed(lambda: small.copy_(a), 2 * a.nbytes, 20),
        "elementwise": _timed(lambda: gated(a, b), EXPONENTIAL * IN_CACHE, 5),
        "batched": _batched(),
        "launch": _launch(backend, folder),
    }


def _launch(backend: Backend, folder: Path) -> Callable[[], float]:
    """An operator call, with Python, autograd and compiled code's checks: a step in which nothing else counts."""
    costs = predicted(TINY, NO_LIMITS)
    step, launches = stepper(backend, TINY, folder, **TINY_WIDTHS), sum(part.launches for part in costs.parts)
    step(), step()
    return lambda: statistics.median(step() for _ in range(REPEATS)) / launches


def _batched() -> Callable[[], float]:
    """The five products of attention's backward pass, for a document of 256 tokens with 3 query heads to one key."""
    q, k, scores = torch.randn(4, 3 * 256, 64), torch.randn(4, 256, 64), torch.randn(4, 3 * 256, 256)

    def work() -> None:
        _ = q @ k.mT, q @ k.mT, scores.mT @ q, scores.mT @ q, scores @ k

    return _timed(work, 5 * 2 * q.numel() * 256, 2)


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def _products(side: int) -> Callable[[], float]:
    """Products with a shortest side: as rows, as columns, and as the sum, each with several weights in turn.

    In a step a weight comes from memory, not from the cache that the product before has left it in.
    """
    m, n = OTHER_SIDES
    shapes = [(side, m, n), (m, n, side), (m, side, n)]
    pairs = [(torch.randn(rows, inner), torch.randn(WEIGHTS, columns, inner)) for rows, inner, columns in shapes]
    work = [(x, weight) for x, weights in pairs for weight in weights]
    return _timed(lambda: [x @ weight.T for x, weight in work], WEIGHTS * 3 * 2 * side * m * n)


def _timed(work: Callable[[], object], amount: float, repeats: int = 1) -> Callable[[], float]:
    """Return a function that returns the least seconds for one of an amount of work."""

    def run() -> float:
        times: list[float] = []
        for _ in range(REPEATS):
            began = time.process_time()
            for _ in range(repeats):
                work()
            times.append(time.process_time() - began)
        return statistics.median(times) / repeats / amount

    run()  # compiles
    return run


def limits_from(seconds: Mapping[str, float]) -> MachineLimits:
    full = seconds[f"side {min(OTHER_SIDES)}"]
    shares = {side: min(1.0, full / seconds[f"side {side}"]) for side in SIDES} | {min(OTHER_SIDES): 1.0}
    return MachineLimits(
        "measured just now", {"float32": 1 / full}, 1 / seconds["elementwise"], 1 / seconds["memory"], None,
        seconds["launch"], 0.0, attention_share=full / seconds["batched"] / shares[64], side_shares=shares,
        cached=(CACHE_BYTES, 1 / seconds["cache"]), is_asynchronous=False,
    )  # fmt: skip


# --- tables -----------------------------------------------------------------------------------------------------------


def validated(found: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{case['tokens']:,}", f"{case['predicted_s']:.2f} s",
         f"{case['measured_s']:.2f} s ({case['measured_least_s']:.2f} to {case['measured_most_s']:.2f})",
         f"{case['ratio']:.2f}")
        for name, case in found["cases"].items()
    ]  # fmt: skip
    return page_tables.table(("shape", "tokens", "predicted", "measured", "measured / predicted"), rows)


def machines() -> str:
    header = ("step of 16,384 tokens in documents of 2,048", *MACHINES)
    rows = [
        (", ".join(filter(None, (model.rpartition("/")[2], kind))), *(speed(model, kind, name) for name in MACHINES))
        for model, kind in MODELS
    ]
    return page_tables.table(header, rows)


def speed(model: str, kind: str, machine: str) -> str:
    """Tokens/s and what bounds the step, if the run fits by the planner; micro-batches of 8,192 tokens on a GPU."""
    is_mac = machine.startswith("m")
    backend, device = ("mlx", "metal") if is_mac else ("torch", "cuda")
    quantization = {"4 bits": "affine4" if is_mac else "nf4"}.get(kind, "none")
    decoder, tokens = decoder_of(KNOWN[model]), 2048 if is_mac else 8192
    ask = Ask(backend, device, quantization, "bfloat16", 16, SEVEN, tokens, 2048)
    has = budget(named(machine), device).bytes
    plan = make_plan(decoder, ask, Budget(has, ""), auto=True)
    if not plan.fits:
        return "does not fit"
    documents = step_documents(np.full(8, 2048), SequenceLayout(tokens, tokens), "2,048 tokens each")
    found = predict(decoder, plan.ask, documents, limits_for(machine))
    return f"{found.tokens_per_s:,.0f} tokens/s, {found.utilisation:.0%}, {found.bound}"


if __name__ == "__main__":
    main()
