"""What a cache of the hidden states below the lowest adapter saves: processor time of a step and of an evaluation.

    python benchmarks/activation_cache.py [--rounds 7] [SHAPE …]
    python benchmarks/activation_cache.py --table    # writes results/activation_cache.md from the result

Random weights in float32, torch on one thread of the CPU, packed documents of 100 to 330 random tokens, the adapter of
the default config with dropout, on the upper half and on the upper quarter of the layers. One engine takes both kinds
of steps in turns, forth and back: making the micro-batches (with the cache that reads it, from the system's memory of
files), forward, backward, update with a rate of 0. Each time is divided by that of the same round without the cache,
and the medians are reported. Losses are those of two engines over STEPS steps that do learn. Writes
results/activation_cache.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read by torch, which is not imported yet

import numpy as np
import page_tables
import record
from memory_estimate import CONFIGS

from dualtune.config.schema import AdapterConfig
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import Documents, in_memory
from dualtune.engine.backend import Backend, Engine, LoadRequest, get_backend
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.activation_cache import use_cache
from dualtune.train.team import Team

SHAPES = {"llama-19m": 8, "SmolLM2-135M": 4}  # and how many documents make up a step
UPPER = {"half": 2, "quarter": 4}
LENGTHS, LAYOUT = (100, 330), SequenceLayout(2048, 2048)
IN = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
STEPS, RATE = 8, 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--table", action="store_true", help="write the table of the recorded result")
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    args = parser.parse_args()
    if args.table:
        found = json.loads((record.RESULTS / "activation_cache.json").read_text(encoding="utf-8"))
        print(page_tables.write(page_tables.RESULTS / "activation_cache.md", {"measured": table(found)}))
        return
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DUALTUNE_CACHE"] = folder
        for shape in args.shapes:
            for part in UPPER:
                cases[f"{shape}, upper {part}"] = measure(shape, part, args.rounds, Path(folder))
                print(json.dumps(cases, indent=2), flush=True)
    setting = {"rounds": args.rounds, "steps_of_losses": STEPS, "dtype": "float32", "threads": 1}
    print(record.write("activation_cache", {**setting, "cases": cases}))


def measure(shape: str, part: str, rounds: int, folder: Path) -> dict[str, Any]:
    config, backend = CONFIGS[shape], get_backend("torch", "cpu")
    (folder / "config.json").write_text(json.dumps(config))
    num_layers = config["num_hidden_layers"]
    below = num_layers - num_layers // UPPER[part]
    load = partial(engine_on, backend, folder, range(below, num_layers))
    engine, plain, cached = load(), documents_of(config, shape), documents_of(config, shape)
    for _ in range(2):  # the first time compiles
        shutil.rmtree(folder / "activations", ignore_errors=True)
        before, cached.hidden = time.process_time(), None
        use_cache(engine, backend, [cached], {"random": shape}, Team(), packs=True)
        fill_s = time.process_time() - before
    works = {
        f"{work.__name__}, {name}": partial(work, engine, documents)
        for work in (step, evaluation)
        for name, documents in (("computed", plain), ("cached", cached))
    }
    ratios = in_turns(works, rounds)
    losses = {name: losses_of(load(), documents) for name, documents in (("computed", plain), ("cached", cached))}
    gaps = [abs(a - b) for a, b in zip(losses["computed"], losses["cached"], strict=True)]
    return {
        "layers": num_layers, "layers_below": below, "tokens_per_step": plain.num_tokens,
        "bytes_per_token": config["hidden_size"] * 4, "fill_s": fill_s, **ratios, "largest_loss_gap": max(gaps),
        "losses": losses, "kernels": engine.description.kernels,
    }  # fmt: skip


def engine_on(backend: Backend, folder: Path, layers: range) -> Engine:
    spec = AdapterConfig()
    paths = [f"model.layers.{i}.{group}.{name}" for i in layers for group, names in IN.items() for name in names]
    adapter = AdapterSpec(spec.rank, spec.alpha, spec.dropout, tuple(paths))
    return backend.load(LoadRequest(folder, "float32", "auto", "random", adapter, OptimizerSpec(), seed=1))


def documents_of(config: Mapping[str, Any], shape: str) -> Documents:
    rng = np.random.default_rng(0)
    lengths = rng.integers(*LENGTHS, SHAPES[shape])
    return in_memory([(rng.integers(0, config["vocab_size"], n).astype(np.int32), np.ones(n, bool)) for n in lengths])


def step(engine: Engine, documents: Documents, number: int = 0, lr: float = 0.0) -> float:
    """Take an optimizer step with all documents, and return its loss."""
    batches = micro_batches(documents, range(len(documents)), LAYOUT, seed=0, step=number)
    divisor = sum(batch.num_targets for batch in batches)
    for batch in batches:
        engine.forward_backward(batch, divisor=divisor)
    return float(engine.optim_step(lr=lr, max_grad_norm=1.0).loss)


def evaluation(engine: Engine, documents: Documents) -> float:
    batches = micro_batches(documents, range(len(documents)), LAYOUT, seed=0, step=0)
    return sum(engine.evaluate(batch).loss_sum for batch in batches)


def in_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Return the processor seconds of each work, and the median ratio of those with the cache to those without."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):  # the first round warms up
        for name in list(works)[:: -1 if number % 2 else 1]:
            before = time.process_time()
            works[name]()
            if number:
                seconds[name].append(time.process_time() - before)
    found: dict[str, Any] = {"median_s": {name: statistics.median(each) for name, each in seconds.items()}}
    for work in ("step", "evaluation"):
        pairs = zip(seconds[f"{work}, cached"], seconds[f"{work}, computed"], strict=True)
        ratios = [with_cache / without for with_cache, without in pairs]
        found[f"{work}_ratio"] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return found


def losses_of(engine: Engine, documents: Documents) -> list[float]:
    return [step(engine, documents, number, RATE) for number in range(STEPS)]


def table(result: Mapping[str, Any]) -> str:
    """Return the table of results/activation_cache.md."""
    header = (
        "adapter on",
        "layers below",
        "step",
        "evaluation",
        "filling the cache",
        "bytes per token",
        "loss differs",
    )
    rows = [
        (
            name, f"{case['layers_below']} of {case['layers']}",
            *(spread(case[f"{work}_ratio"]) for work in ("step", "evaluation")),
            f"{case['fill_s'] / case['median_s']['step, computed']:.2f} steps", f"{case['bytes_per_token']:,}",
            f"at most {case['largest_loss_gap']:.0e}" if case["largest_loss_gap"] else "in no bit",
        )
        for name, case in result["cases"].items()
    ]  # fmt: skip
    return page_tables.table(header, rows)


def spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"


if __name__ == "__main__":
    main()
