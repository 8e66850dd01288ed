"""How much of a CPU a training step uses: SmolLM2-135M-Instruct on torch, on real rows, by dtype and quantization.

    python benchmarks/utilisation.py --shared ../shared [--work build/peers-work] [--rounds 3] [VARIANT …]

A variant is dtype/quantization/workload, such as bfloat16/nf4/wikisql; a step takes 8 rows. What a CPU without AVX-512
gives is recorded as VARIANT/avx2. Utilisation is the model's operations for their tokens (`training_flops` in
dualtune/doctor/bench/measure.py), of the step, or of the forward pass for an evaluation, by the time, as a share of a
large matrix product's in that dtype. That product takes its turn in each round. One thread, and processor seconds, so
that other work on the machine disturbs little. `products` is what the step's matrix products reach by themselves, and
`shares` where the seconds are, both by torch's profiler. `fingerprint`: seconds for that of the adapter and that of the
base, at the end of a run. Writes results/utilisation.json and .md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record
import torch
from origins import with_origins
from peers_inputs import DOCUMENTS_PER_STEP, MAX_LENGTH, REAL, SPEC, WORKLOADS, Inputs, make_inputs

from dualtune.data.batches import SequenceLayout, micro_batches, trimmed
from dualtune.data.documents import in_memory
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.doctor.bench.measure import document_lengths, read_shape, training_flops
from dualtune.engine.backend import Batch, LoadRequest, get_backend
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.fingerprints import base_fingerprints, fingerprints
from dualtune_torch.card.memory import LOSS_ROWS
from dualtune_torch.kernels.products import has_avx512, linear, times

ROOT = Path(__file__).parents[1]
VARIANTS = (
    "float32/none/gsm8k", "float32/none/wikisql", "bfloat16/none/gsm8k", "bfloat16/none/wikisql",
    "bfloat16/nf4/gsm8k", "bfloat16/int8/gsm8k", "bfloat16/affine4/gsm8k",
)  # fmt: skip
SIDE = 2048  # of the matrices that measure the machine
TOKENS, REPEATS = 1024, 4
LINEARS = {  # rows, columns and results of the products with a weight
    "q_proj, o_proj": (TOKENS, 576, 576), "k_proj, v_proj": (TOKENS, 576, 192),
    "gate_proj, up_proj": (TOKENS, 576, 1536), "down_proj": (TOKENS, 1536, 576),
    "head, a chunk": (LOSS_ROWS["cpu"], 576, 49152), "A of one layer": (TOKENS, 576, 16), "B": (TOKENS, 16, 576),
}  # fmt: skip
HEAD = "| dtype / base / rows | tokens a step | tokens/s | step | evaluation | products | fingerprint, s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="a folder with data/ and tokenizers/smollm2")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "peers-work", help="folder for weights and data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("variants", nargs="*", default=VARIANTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    path = record.RESULTS / "utilisation.json"
    parts = record.runs("utilisation", "parts")
    for variant in args.variants:
        name = variant if has_avx512() else f"{variant}/avx2"  # the products of the two do not compare
        parts[name] = record.origin() | measure(variant, args.shared.resolve(), args.work.resolve(), args.rounds)
        print(row(name, parts[name]), flush=True)
        record.write("utilisation", {"rounds": args.rounds, "parts": parts})
        path.with_suffix(".md").write_text(with_origins(table(parts), path.stem), encoding="utf-8")


def measure(variant: str, shared: Path, work: Path, rounds: int) -> dict[str, Any]:
    dtype, quantization, workload = variant.split("/")
    inputs = make_inputs(work, shared, REAL, WORKLOADS[workload], 1, dtype)
    batches = batches_of(inputs)
    backend = get_backend("torch", "cpu")
    engine = backend.load(
        LoadRequest(inputs.model, dtype, quantization, "pretrained", SPEC, OptimizerSpec(), seed=1, kernels="auto")
    )
    num_targets = sum(batch.num_targets for batch in batches)

    def step() -> None:
        for batch in batches:
            engine.forward_backward(batch, divisor=num_targets)
        float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)

    def evaluate() -> None:
        for batch in batches:
            float(engine.evaluate(batch).loss_sum)

    works = {"product": backend.matmul(SIDE, dtype), "step": step, "evaluation": evaluate}
    for work_ in works.values():
        work_()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work_ in works.items():
            seconds[name].append(timed(work_))
    tokenizer = Tokenizer(inputs.model)
    prints_s = timed(lambda: (base_fingerprints(engine, tokenizer), fingerprints(engine, tokenizer)))
    description = engine.description
    shape = read_shape(
        inputs.model, num_parameters=description.num_parameters, adapter_parameters=description.trainable_parameters
    )
    flops, limit = training_flops(shape, document_lengths(batches)), 2 * SIDE**3 / min(seconds["product"])
    profile = backend.profile(step, work).seconds
    shares = {kind: s / sum(profile.values()) for kind, s in sorted(profile.items(), key=lambda item: -item[1])}
    linears = {name: sizes for name, sizes in LINEARS.items() if quantization == "none"}
    in_products = sum(shares.get(kind, 0.0) for kind in ("matrix products", "attention kernels"))
    step_s, evaluation_s = median(seconds["step"]), median(seconds["evaluation"])
    return {
        "kernels": description.kernels,
        "num_tokens": inputs.num_tokens[0],
        "seconds": seconds,
        "limit_flops": limit,
        "flops": {"forward": flops.forward, "backward": flops.backward},
        "tokens_per_s": inputs.num_tokens[0] / step_s,
        "utilisation": {
            "step": flops.total / step_s / limit,
            "evaluation": flops.forward / evaluation_s / limit,
            "products": flops.total / (step_s * in_products) / limit,
        },
        "fingerprint_s": prints_s,
        "linears": {name: [rate / limit for rate in rates(*sizes, dtype)] for name, sizes in linears.items()},
        "shares": shares,
    }


def batches_of(inputs: Inputs) -> list[Batch]:
    """The micro-batches of the first step, as a CPU computes them."""
    lines = inputs.documents.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(lines[i]) for i in inputs.order[:DOCUMENTS_PER_STEP]]
    documents = in_memory([(np.array(row["input_ids"], np.int32), np.array(row["labels"]) != -100) for row in rows])
    layout = SequenceLayout(MAX_LENGTH, 2048)
    return [trimmed(batch) for batch in micro_batches(documents, range(DOCUMENTS_PER_STEP), layout, seed=0, step=0)]


def rates(rows: int, columns: int, out: int, dtype: str) -> tuple[float, float]:
    """What x Wᵀ and g W reach as a step computes them, in operations a second."""
    x, g, weight = (
        torch.randn(size).to(getattr(torch, dtype)) for size in ((rows, columns), (rows, out), (out, columns))
    )
    works = (lambda: linear(x, weight), lambda: times(g, weight))
    with torch.no_grad():
        found = [min(timed(work) for _ in range(REPEATS)) for work in works]
    forward, backward = (2 * rows * columns * out / seconds for seconds in found)
    return forward, backward


def timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


# --- table ---


def table(parts: dict[str, Any]) -> str:
    lines = [
        "# What a step uses of a CPU", "",
        "Made by [benchmarks/utilisation.py](../utilisation.py), which says what is measured and how: "
        f"SmolLM2-135M-Instruct, {DOCUMENTS_PER_STEP} rows a step, one thread. Shares are comparable between days; "
        "tokens/s are not, because the machines were not one.", "",
        HEAD, "|---" * HEAD.count(" | ") + "|---|", *(row(name, part) for name, part in parts.items()), "",
        "Where the seconds of a step are:", "",
    ]  # fmt: skip
    kinds = list(dict.fromkeys(kind for part in parts.values() for kind in part["shares"]))
    lines += [f"| dtype / base / rows | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name, part in parts.items():
        shares = (f"{part['shares'].get(kind, 0):.0%}" for kind in kinds)
        lines.append(f"| {name.replace('/', ' / ')} | {' | '.join(shares)} |")
    lines += ["", f"Single products of {TOKENS:,} tokens, forward / backward, beside the large one:", ""]
    lines += [f"| dtype / base / rows | {' | '.join(LINEARS)} |", "|---" * (len(LINEARS) + 1) + "|"]
    for name, part in ((name, part) for name, part in parts.items() if part["linears"]):
        cells = [f"{forward:.0%} / {backward:.0%}" for forward, backward in part["linears"].values()]
        lines.append(f"| {name.replace('/', ' / ')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def row(name: str, part: dict[str, Any]) -> str:
    share = part["utilisation"]
    cells = [
        name.replace("/", " / "), str(part["num_tokens"]), f"{part['tokens_per_s']:.0f}", f"**{share['step']:.0%}**",
        f"{share['evaluation']:.0%}", f"{share['products']:.0%}", f"{part['fingerprint_s']:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
