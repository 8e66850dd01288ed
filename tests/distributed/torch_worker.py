"""What one process computes of a step, in every way that a base can be held: `main` writes it down."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dualtune.adapter.spec import LoraSpec
from dualtune.backend import LoadRequest, get_backend
from dualtune.data.batches import Layout, micro_batches
from dualtune.data.documents import in_memory
from dualtune.testing.conformance_case import random_adapter
from dualtune.testing.tiny_models import random_batch
from dualtune.train.team import Team

LENGTHS = (9, 30, 5, 14, 22, 7, 17)
SPEC = LoraSpec(rank=4, alpha=6.0, dropout=0.1, targets=("all-linear",))
# Micro-batches of several rows, rows of several documents, and a document for one process alone.
LAYOUTS = {"padded": (Layout(64), 7), "packed": (Layout(32, 32), 7), "single": (Layout(64), 1)}
# name: dtype, quantization, kernels, how a process that is not alone holds the base, and what is computed with it
ENGINES = {
    "data": ("float32", "none", "auto", "none", ("padded", "packed", "single")),
    "full": ("float32", "none", "auto", "full", ("padded", "packed", "single")),
    "reference": ("float32", "none", "reference", "full", ("padded",)),
    "bfloat16": ("bfloat16", "none", "auto", "full", ("padded",)),
    "affine4": ("float32", "affine4", "auto", "full", ("padded",)),
    "tied": ("float32", "none", "auto", "full", ("padded",)),
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
            directory, dtype, quantization, "pretrained", SPEC, 0.0, seed=1, kernels=kernels, sharding=sharding
        )
        engine = backend.load(request)
        assert engine.description.sharding == sharding
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        for layout in layouts:
            found = step(engine, team, documents, *LAYOUTS[layout])
            results |= {f"{name} {layout} {key}": value for key, value in found.items()}
        results[f"{name} logprobs"] = engine.logprobs(random_batch((8, 5), 96))
        results[f"{name} bytes"] = held(engine)
    np.savez(Path(out) / f"{team.size}-{team.rank}.npz", **results)


def step(engine, team, documents, layout, count):
    """The gradient of the first documents, and the loss after a step of plain gradient descent."""
    share = micro_batches(documents, range(count), layout, seed=1, step=0, rank=team.rank, size=team.size)
    num_targets, _ = team.total(sum(batch.num_targets for batch in share))
    before, adapter = engine.optimizer_state(), engine.adapter_state()
    for batch in share:
        engine.forward_backward(batch, num_targets=int(num_targets))
    output = engine.optim_step(lr=0.0, max_grad_norm=None)
    # Without clipping m' = 0.9 m + 0.1 g, so the gradient can be read from it, whatever AdamW makes of it.
    gradient = {n: (m - 0.9 * before.m[n]) / 0.1 for n, m in engine.optimizer_state().m.items()}
    engine.load_optimizer_state(replace(before, step=0))
    engine.load_adapter_state({n: adapter[n] - gradient[n] for n in adapter})
    after, _ = team.total(sum(engine.evaluate(batch).loss_sum for batch in share))
    engine.load_adapter_state(adapter)
    return gradient | {
        "loss": float(output.loss),
        "norm": float(output.grad_norm),
        "loss after": after / num_targets,
        "rows": sum(len(batch.tokens_BT) for batch in share if batch.num_targets),
    }


def held(engine) -> int:
    """Bytes of the base that this process holds, counted by what torch has allocated for them."""
    tensors = [t for n, t in [*engine.model.named_parameters(), *engine.model.named_buffers()] if "lora_" not in n]
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(part.untyped_storage().nbytes() for part in parts)


if __name__ == "__main__":
    main(*sys.argv[1:])
