"""What each format of the base costs in accuracy and in bytes.

    python benchmarks/quantization.py [--shared ../shared]

Two tables. Errors and bytes of each format on a matrix of random bfloat16 weights. The evaluation loss of stories260k
on rows of WikiSQL before LoRA on the quantized base, after 10 steps of it and, on torch, after 60: float32 compute, the
same seeds for all, each in a process. It is skipped where the model is not there. Writes results/quantization.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from tokenizers import Tokenizer
from torch import nn

from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import in_memory
from dualtune.engine.backend import Batch, Engine, LoadRequest, get_backend
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune_torch.model import _finish  # pyright: ignore[reportPrivateUsage]
from dualtune_torch.weights.frozen import stored_bytes, weight_of

FORMATS = ("int8", "affine8", "affine4", "nf4")
TUNED = [("torch", name) for name in ("none", *FORMATS)] + [
    ("mlx", name) for name in ("none", "int8", "affine8", "affine4")
]
SHAPE = (1408, 2048)
MEASURED = {"torch": (0, 10, 60), "mlx": (0, 10)}  # after so many steps
DOCUMENTS, LEARNING_RATE = 8, 3e-3
HELD_OUT, ROWS, LONGEST = 60, 400, 128
LAYOUT = SequenceLayout(2048, LONGEST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    args = parser.parse_args()
    figures: dict[str, Any] = {"matrices": [*matrices()]}
    if (args.shared / "models/stories260k").exists():
        with ProcessPoolExecutor(len(TUNED), get_context("spawn")) as pool:
            figures["stories260k"] = [*pool.map(tuned, repeat(args.shared), *zip(*TUNED, strict=True))]
    else:
        print(f"no {args.shared}/models/stories260k, so no losses are measured")
    print(json.dumps(figures, indent=2), record.write("quantization", figures), sep="\n")


def matrices() -> Iterator[dict[str, Any]]:
    """Errors relative to the weights as stored; bytes with scales and all other tables."""
    generator = np.random.default_rng(0)
    kinds = {"normal": generator.normal(size=SHAPE), "Student's t, 4 degrees": generator.standard_t(4, SHAPE)}
    for kind, numbers in kinds.items():
        weight = torch.from_numpy(0.02 * numbers).bfloat16()
        for name in FORMATS:
            plain = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
            plain.weight = nn.Parameter(weight.clone(), requires_grad=False)
            layer: Any = _finish(name, torch.bfloat16, head=None, family="llama")("layer", plain)
            error = weight_of(layer, torch.bfloat16).float() - weight.float()
            yield {
                "weights": kind,
                "format": name,
                "relative_l2": float(error.norm() / weight.float().norm()),
                "mean_error_of_largest_weight": float(error.abs().mean() / weight.float().abs().max()),
                "bytes_per_parameter": stored_bytes(layer) / weight.numel(),
            }


def tuned(shared: Path, backend: str, quantization: str) -> dict[str, Any]:
    model_dir = shared / "models/stories260k"
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    with (shared / "data/wikisql/train.jsonl").open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in islice(file, ROWS)]
    ids = [np.array(tokenizer.encode(text).ids[:LONGEST], np.int32) for text in texts]
    documents = in_memory([(row, np.ones(len(row), bool)) for row in ids])
    spec = AdapterSpec(8, 16.0, 0.0, ("all-linear",))
    engine = get_backend(backend, "cpu").load(
        LoadRequest(model_dir, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=1)
    )
    order, losses = np.random.default_rng(0), dict[int, float]()
    for step in range(MEASURED[backend][-1] + 1):
        if step in MEASURED[backend]:
            losses[step] = loss_of(engine, micro_batches(documents, range(HELD_OUT), LAYOUT, seed=0, step=0))
        chosen = order.choice(np.arange(HELD_OUT, ROWS), DOCUMENTS, replace=False).tolist()
        train(engine, micro_batches(documents, chosen, LAYOUT, seed=0, step=step))
    found = {"backend": backend, "format": quantization, "loss_after_steps": losses}
    print(found, flush=True)
    return found


def train(engine: Engine, batches: list[Batch]) -> None:
    num_targets = sum(batch.num_targets for batch in batches)
    for batch in batches:
        engine.forward_backward(batch, divisor=num_targets)
    engine.optim_step(lr=LEARNING_RATE, max_grad_norm=1.0)


def loss_of(engine: Engine, batches: list[Batch]) -> float:
    loss = math.fsum(float(engine.evaluate(batch).loss_sum) for batch in batches)
    return loss / sum(batch.num_targets for batch in batches)


if __name__ == "__main__":
    main()
