"""What packing gains: tokens per second with documents that share rows, against each in a row of its own, in turns.

    python benchmarks/packing.py [--shared ../shared] [--rounds 9] [CASE …]
    python benchmarks/packing.py --table    # writes the table of docs/data.md from the recorded result

Both sides are ours, and train on the same documents in the same steps: `data.packing: false` puts documents of like
length into a micro-batch, so little is padded there, too. A case is a backend, a model and its rows: the demo's, which
are part of dualtune, or a Llama of 18.9M random weights on real rows of --shared, on one thread of the CPU (MLX takes
more). Seconds are those of the processor, which other work disturbs less. In each round both sides take the same steps,
in changing order; the ratio is the median over the rounds. Losses must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads

import page_tables
import record
from origins import read
from peers_inputs import TOKENIZER, WORKLOADS, save_model

import dualtune
from dualtune.config import Config, load_config
from dualtune.data.batches import micro_batches
from dualtune.data.documents import Data, Documents
from dualtune.data.order import Order
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Engine, LoadRequest, get_backend
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.evaluation import layout_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "data.md"
DEMO = Path(dualtune.__file__).parent / "demo"
DEMO_NAME, SHAPE = "the demo's", "llama-19m"
STEPS = 3  # different ones, in each round
SAME_LOSS = 2e-3  # relative: sums in another order, in float32
SIDES = {"packed": True, "alone": False}


@dataclass(frozen=True, slots=True)
class Case:
    backend: str
    workload: str | None  # of peers_inputs; None: the demo's model and rows

    @property
    def name(self) -> str:
        model = DEMO_NAME if self.workload is None else f"{SHAPE} on {self.workload}"
        return f"{self.backend}, {model}"


CASES = {case.name: case for case in (
    Case("torch", None), Case("mlx", None), Case("torch", "gsm8k"), Case("torch", "wikisql"),
)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--table", action="store_true", help="write the table of the recorded result")
    parser.add_argument("cases", nargs="*", metavar="CASE", default=[*CASES])
    args = parser.parse_args()
    if args.table:
        return print(page_tables.write(PAGE, tables(read("packing"))))
    cases = measured(args.cases, args.shared, partial(measure, rounds=args.rounds))
    return print(record.write("packing", {"rounds": args.rounds, "steps": STEPS, "cases": cases}))


def measured(
    names: Sequence[str], shared: Path, measure: Callable[[Case, Path, Path], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what `measure` says of each case, given a temporary folder and the data; without data, of the others."""
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DUALTUNE_CACHE"] = str(Path(folder) / "cache")
        for name in names:
            if CASES[name].workload is not None and not (shared / TOKENIZER).is_dir():
                print(f"{name}: left out, there is no {shared / TOKENIZER}")
                continue
            cases[name] = measure(CASES[name], Path(folder), shared.resolve())
            print(name, json.dumps(cases[name], indent=2), flush=True)
    return cases


def configs(case: Case, folder: Path, shared: Path) -> dict[str, Config]:
    """Return the config of each side. `train.micro_batch_tokens` is auto: what a step computes at once is the same."""
    base: dict[str, Any]
    if case.workload is None:
        base = {
            "model": {"name": str(DEMO / "model"), "dtype": "float32"},
            "data": {"train": str(DEMO / "data" / "train.jsonl"), "eval": 0, "max_length": 256},
        }
    else:
        workload = WORKLOADS[case.workload]
        model = save_model(folder / SHAPE, shared / TOKENIZER, SHAPE, "float32")
        rows = {"train": str(shared / workload.rows), "columns": workload.columns, "loss_on": workload.loss_on}
        base = {
            "model": {"name": str(model), "dtype": "float32"},
            "data": {**rows, "eval": 0, "max_length": 1024},
        }
    base["train"] = {"documents_per_step": 16, "steps": STEPS}
    return {side: load_config(base, [f"data.packing={str(is_packed).lower()}"]) for side, is_packed in SIDES.items()}


def measure(case: Case, folder: Path, shared: Path, rounds: int) -> dict[str, Any]:
    by_side = configs(case, folder, shared)
    config = by_side["packed"]
    documents, _ = Data(config).train_and_eval(Tokenizer(Path(config.model.name), config.data.template))
    order = Order(config, documents.lengths)
    steps = [order.step(index).documents.tolist() for index in range(STEPS)]
    sides = {side: Side(case.backend, each, documents, steps) for side, each in by_side.items()}

    first = {side: each.take() for side, each in sides.items()}  # compiles, and is not counted
    losses = [loss for _, loss in first.values()]
    assert abs(losses[0] - losses[1]) <= SAME_LOSS * abs(losses[1]), losses
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in [*sides][:: -1 if number % 2 else 1]:
            seconds[side].append(sides[side].take()[0])

    ratios = [alone / packed for packed, alone in zip(seconds["packed"], seconds["alone"], strict=True)]
    num_tokens = sum(int(documents.lengths[ids].sum()) for ids in steps)
    return {
        "tokens": num_tokens,
        "documents": sum(map(len, steps)),
        "padding": {side: 1 - num_tokens / each.cells for side, each in sides.items()},
        "micro_batches": {side: each.num_micro_batches for side, each in sides.items()},
        "tokens_per_s": {side: num_tokens / statistics.median(times) for side, times in seconds.items()},
        "ratio": {"lowest": min(ratios), "median": statistics.median(ratios), "highest": max(ratios)},
        "losses": {side: loss for side, (_, loss) in first.items()},
    }


class Side:
    """An engine, and the micro-batches of its steps."""

    def __init__(self, backend: str, config: Config, documents: Documents, steps: Sequence[Sequence[int]]) -> None:
        adapter = config.adapter
        request = LoadRequest.of(
            config, model_dir=Path(config.model.name), longest=int(documents.lengths.max()), optimizer=OptimizerSpec(),
            adapter=AdapterSpec(adapter.rank, adapter.alpha, adapter.dropout, tuple(adapter.targets)),
        )  # fmt: skip
        self._engine: Engine = get_backend(backend, "cpu").load(request)
        layout = layout_of(config)
        self._steps = [micro_batches(documents, ids, layout, seed=0, step=n) for n, ids in enumerate(steps)]

    def take(self) -> tuple[float, float]:
        """Take all steps. Return their seconds of the processor, and the sum of their losses."""
        began, loss = time.process_time(), 0.0
        for batches in self._steps:
            num_targets = sum(batch.num_targets for batch in batches)
            for batch in batches:
                self._engine.forward_backward(batch, divisor=num_targets)
            loss += float(self._engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
        return time.process_time() - began, loss

    @property
    def num_micro_batches(self) -> int:
        return sum(map(len, self._steps))

    @property
    def cells(self) -> int:
        """The tokens that are computed, padding included."""
        return sum(batch.tokens_BT.size for batches in self._steps for batch in batches)


def tables(found: Mapping[str, Any]) -> dict[str, str]:
    header = ("model and rows", "tokens per second, packed : not", "padding", "micro-batches of a step")
    rows = [
        (
            name,
            f"{case['ratio']['median']:.2f} ({case['ratio']['lowest']:.2f} to {case['ratio']['highest']:.2f})",
            _both(case["padding"], lambda share: f"{100 * share:.0f} %"),
            _both(case["micro_batches"], lambda number: f"{number / found['steps']:.3g}"),
        )
        for name, case in found["cases"].items()
    ]
    return {"packing": page_tables.table(header, rows)}


def _both(values: Mapping[str, float], shown: Any) -> str:
    return " : ".join(shown(values[side]) for side in SIDES)


if __name__ == "__main__":
    main()
