"""What one process computes of a step, in every way that a base can be held: `main` writes it down."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import in_memory
from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.testing.conformance_case import random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.team import Team

LENGTHS = (9, 30, 5, 14, 22, 7, 17)
SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.1, targets=("all-linear",))
# Micro-batches of several rows, rows of several documents, and a document for one process alone.
LAYOUTS = {"padded": (SequenceLayout(64), 7), "packed": (SequenceLayout(32, 32), 7), "single": (SequenceLayout(64), 1)}
# What computes with the numbers of the base, not only with its products.
READS = {"dora": {"method": "dora"}, "pissa": {"init": "pissa"}, "olora": {"init": "olora"},
         "merge_for": {"merge_for": "q4_0"}, "merged dora": {"merge_for": "q4_0", "method": "dora"}}  # fmt: skip
# name: dtype, quantization, kernels, how a process that is not alone holds the base, and what is computed with it
ENGINES = {
    "data": ("float32", "none", "auto", "none", ("padded", "packed", "single")),
    "full": ("float32", "none", "auto", "full", ("padded", "packed", "single")),
    "reference": ("float32", "none", "reference", "full", ("padded",)),
    "bfloat16": ("bfloat16", "none", "auto", "full", ("padded",)),
    "affine4": ("float32", "affine4", "auto", "full", ("padded",)),
    "int8": ("float32", "int8", "auto", "full", ("padded",)),
    "tied": ("float32", "none", "auto", "full", ("padded",)),
    "dora": ("float32", "affine4", "auto", "full", ("padded",)),
    **dict.fromkeys(("pissa", "olora", "merge_for", "merged dora"), ("float32", "none", "auto", "full", ("padded",))),
}


def main(model: str, tied: str, out: str) -> None:
    backend = get_backend("torch", "cpu")
    team = Team(backend.world())
    rng = np.random.default_rng(0)
    documents = in_memory([(rng.integers(3, 96, n, np.int32), np.arange(n) > 1) for n in LENGTHS])
    results = {}
    for name, (dtype, quantization, kernels, sharding, layouts) in ENGINES.items():
        sharding = sharding if team.size > 1 else "none"
        directory = Path(tied if name == "tied" else model)
        request = LoadRequest(
            directory,
            dtype,
            quantization,
            "pretrained",
            replace(SPEC, **READS.get(name, {})),
            OptimizerSpec("sgd"),
            seed=1,
            kernels=kernels,
            sharding=sharding,
        )
        engine = backend.load(request)
        assert engine.description.sharding == sharding
        if name in READS:
            results |= {f"{name} start {key}": value for key, value in engine.adapter_state().items()}
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        for layout in layouts:
            found = step(engine, team, documents, *LAYOUTS[layout])
            results |= {f"{name} {layout} {key}": value for key, value in found.items()}
        if name == "data":
            found = step(engine, team, weighted(documents), *LAYOUTS["packed"])
            results |= {f"{name} weighted {key}": value for key, value in found.items()}
        results[f"{name} logprobs"] = engine.logprobs(random_batch((8, 5), 96))
        results[f"{name} bytes"] = held(engine)
    np.savez(Path(out) / f"{team.size}-{team.rank}.npz", **results)


def weighted(documents):
    """The same documents, every second with weights that are fractions."""
    masks = [
        np.where(d.loss_mask, 0.25 + 0.1 * i, 0).astype(np.float32) if i % 2 else d.loss_mask
        for i, d in enumerate(documents)
    ]
    return in_memory([(d.tokens, mask) for d, mask in zip(documents, masks, strict=True)])


def step(engine, team, documents, layout, count):
    """The gradient of the first documents, and the loss after a step of plain gradient descent."""
    share = micro_batches(documents, range(count), layout, seed=1, step=0, rank=team.rank, size=team.size)
    (weight,) = team.total(sum(batch.total_weight for batch in share))
    before = engine.adapter_state()
    for batch in share:
        engine.forward_backward(batch, divisor=weight)
    output = engine.optim_step(lr=1.0, max_grad_norm=None)
    gradient = {n: before[n] - w for n, w in engine.adapter_state().items()}
    (after,) = team.total(sum(engine.evaluate(batch).loss_sum for batch in share))
    engine.load_adapter_state(before)
    return gradient | {
        "loss": float(output.loss),
        "norm": float(output.grad_norm),
        "loss after": after / weight,
        "rows": sum(len(batch.tokens_BT) for batch in share if batch.num_targets),
    }


def held(engine) -> int:
    """Bytes of the base that this process holds, counted by what torch has allocated for them."""
    named = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    tensors = [t for n, t in named if "lora_" not in n and not n.endswith(("squares_O", "norms_O"))]
    # What adapted layers keep beside, such as a merge.
    tensors += [t for layer in engine._layers.values() for t in vars(layer).values() if hasattr(t, "untyped_storage")]
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(part.untyped_storage().nbytes() for part in parts)


if __name__ == "__main__":
    main(*sys.argv[1:])
