"""Profile the memory of a loop of your own, step by step, and check what the profiler found.

    python examples/memory_profile_validation.py --smoke            # a tiny model, in seconds
    python examples/memory_profile_validation.py --platform cuda    # the shape of GPT-2 small, 50 steps

The weights are random and the data are random tokens in 2 rows of 64: the loss means nothing here, the memory does.
The phases differ in what they compute: Warmup and Full steps train, Forward steps only evaluate.
"""

import argparse
import csv
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from dualtune.engine.backend import LoadRequest
from dualtune.engine.choose import choose, open_backend
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.profiler.profiler import MemoryProfiler

# openai-community/gpt2, config.json
GPT2_SMALL = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
TINY = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 128, "vocab_size": 512}
WARMUP, FULL, FORWARD = 5, 10, 15  # steps; after the warm-up the other two alternate
ROWS, TOKENS = 2, 64


def phases():
    yield from WARMUP * ["Warmup"]
    while True:
        yield from FULL * ["Full"]
        yield from FORWARD * ["Forward"]


def load(backend, shape):
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "bos_token_id": 0, "eos_token_id": 0}
        config = {"architectures": ["GPT2LMHeadModel"], "n_ctx": shape["n_positions"], **fixed, **shape}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return backend.load(
            LoadRequest(
                Path(folder), dtype="float32", quantization="none", init="random", seed=1, optimizer=OptimizerSpec(),
                adapter=AdapterSpec(rank=8, alpha=16, dropout=0.0, targets=("all-linear",)),
            )
        )  # fmt: skip


def take_step(engine, batch, phase):
    """Return the mean loss. Reading it waits for the device, so the time of a step is that of its work."""
    if phase == "Forward":
        return engine.evaluate(batch).loss_sum / batch.num_targets
    engine.forward_backward(batch, divisor=batch.num_targets)
    return float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)


def profile(engine, profiler, vocab_size, steps):
    print(f"{'step':>4}  {'phase':7}  {'loss':>7}  {'memory MB':>9}  {'Δ MB':>7}  {'ms':>7}")
    before = None
    profiler.start()
    for step, phase in enumerate(islice(phases(), steps)):
        began = time.perf_counter()
        loss = take_step(engine, random_batch(ROWS * [TOKENS + 1], vocab_size, seed=step), phase)
        ms = 1000 * (time.perf_counter() - began)
        now = profiler.record_step(step, phase).used_mb
        change = 0.0 if before is None else now - before
        before = now
        print(f"{step:4}  {phase:7}  {loss:7.4f}  {now:9.1f}  {change:+7.1f}  {ms:7.1f}")


def checks(profiler, steps):
    """Yield what is checked, and whether it holds. The CSV is read again and everything recomputed from it."""
    rows = [*csv.DictReader(profiler.export_csv().splitlines())]
    used = [float(row["used_mb"]) for row in rows]
    yield "snapshots: one for each step", [int(row["step"]) for row in rows] == [*range(steps)]
    yield "peak: the highest of all", abs(profiler.peak.mb - max(used)) < 0.01
    found = profiler.phases()
    yield (
        "phases: their snapshots add up",
        sum(each.num_snapshots for each in found.values()) == steps
        and all(each.min_bytes <= each.mean_bytes <= each.max_bytes for each in found.values()),
    )
    increases = [step for step in range(1, steps) if used[step] - used[step - 1] > 1]
    yield (
        "spikes: each increase above 1 MB",
        {s.step for s in profiler.spikes(1.0)} ^ set(increases)
        <= {
            step
            for step in range(1, steps)
            if abs(used[step] - used[step - 1] - 1) < 0.02  # the CSV is rounded
        },
    )
    yield "CSV: a row with a phase for each step", [row["phase"] for row in rows] == [*islice(phases(), steps)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="auto", help="auto, mlx, cuda, cpu or the name of another backend")
    parser.add_argument("--smoke", action="store_true", help="a tiny model instead of the shape of GPT-2 small")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("memory_profile.csv"))
    args = parser.parse_args()

    shape = TINY if args.smoke else GPT2_SMALL
    backend = open_backend(choose(args.platform))
    profiler = MemoryProfiler(backend.memory)
    profile(load(backend, shape), profiler, shape["vocab_size"], args.steps)
    print(f"\n{profiler.generate_report()}\n")
    args.out.write_text(profiler.export_csv(), encoding="utf-8")
    print(f"CSV: {args.out}")
    failed = 0
    for what, holds in checks(profiler, args.steps):
        print(f"{'ok  ' if holds else 'FAIL'}  {what}")
        failed += not holds
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
