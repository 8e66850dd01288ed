"""Engines, micro-batches and gradients for the checks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.adapter.spec import AdapterSpec, Tensors
from dualtune.backend import Batch, Engine, LoadRequest
from dualtune.memory.ask import Ask
from dualtune.optimizer import OptimizerSpec
from dualtune.selftest.checks.finding import Site
from dualtune.selftest.checks.sizes import TrainedShape
from dualtune.testing.conformance_case import gradient_in, norm_of, random_adapter
from dualtune.testing.tiny_models import LLAMA_CONFIG, pack, random_batch, write_tiny_llama

SEED = 7
RANK = 16
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
}


@dataclass(frozen=True, slots=True)
class LossAndGradient:
    """What a step over some micro-batches computes."""

    loss: float  # per target, in nats
    gradient: Tensors  # of that loss by the adapter, float32


def written_model(site: Site, kind: str) -> Path:
    """Write the random model of a kind in MODELS, once, and return its directory."""
    path = site.directory / kind
    return path if path.exists() else write_tiny_llama(path, **site.sizes.model, **MODELS[kind])


def spec_of(dropout: float) -> AdapterSpec:
    return AdapterSpec(rank=RANK, alpha=2.0 * RANK, dropout=dropout, targets=("all-linear",))


def request_for(model_dir: Path, dtype: str, quantization: str, dropout: float, **changes: Any) -> LoadRequest:
    """Return the request of an engine with AdamW; `changes` are other fields of it."""
    fields: dict[str, Any] = {"init": "pretrained", "seed": SEED} | changes
    return LoadRequest(
        model_dir=model_dir, dtype=dtype, quantization=quantization, adapter=spec_of(dropout),
        optimizer=OptimizerSpec("adamw"), **fields,
    )  # fmt: skip


def compared_batches(site: Site) -> list[Batch]:
    """Return the micro-batches of a comparison: padded rows, and the same lengths packed, where packing is honoured."""
    vocab = int((LLAMA_CONFIG | dict(site.sizes.model))["vocab_size"])
    padded, other = (random_batch(site.sizes.lengths, vocab, seed=seed, pad=3) for seed in (1, 2))
    if True not in site.backend.capabilities().get("data.packing", ()):
        return [padded, other]
    first, *rest = range(len(site.sizes.lengths))
    return [padded, pack(other, [rest, [first]], pad=2)]


def step_of(site: Site, request: LoadRequest, batches: Sequence[Batch]) -> tuple[LossAndGradient, Engine]:
    """Return loss and gradient of a new engine with a random adapter, and the engine."""
    engine = site.backend.load(request)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    divisor = sum(batch.num_targets for batch in batches)
    for batch in batches:
        engine.forward_backward(batch, divisor=divisor)
    loss = float(engine.optim_step(lr=0.0, max_grad_norm=None).loss)
    return LossAndGradient(loss, gradient_in(engine.optimizer_state())), engine


def distance(a: Tensors, b: Tensors) -> float:
    """Return the norm of the difference, as a share of the norm of `b`."""
    return norm_of({name: a[name].astype(np.float64) - b[name] for name in b}) / norm_of(b)


def ask_for(site: Site, shape: TrainedShape) -> Ask:
    """Return the training setup of `loaded_shape`, for an estimate or a prediction."""
    return Ask(
        site.backend.name, site.device.kind, shape.quantization, site.device.auto_dtype, RANK, "all-linear",
        micro_batch_tokens=max(map(sum, shape.lengths)), max_length=max(map(max, shape.lengths)),
    )  # fmt: skip


def loaded_shape(site: Site, shape: TrainedShape, *, dropout: float = 0.05) -> tuple[Engine, list[Batch]]:
    """Load a shape with random weights in the automatic dtype, and return it with its micro-batches."""
    directory = site.directory / shape.name
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(shape.config)), encoding="utf-8")
    request = request_for(
        directory, "auto", shape.quantization, dropout, init="random", longest=max(map(max, shape.lengths))
    )
    return site.backend.load(request), list(shape_batches(shape))


def shape_batches(shape: TrainedShape) -> Iterator[Batch]:
    """Yield the micro-batches of a shape, each one packed row."""
    for number, lengths in enumerate(shape.lengths):
        documents = random_batch(lengths, int(shape.config["vocab_size"]), seed=number)
        yield pack(documents, [range(len(lengths))])


def train_on(site: Site, engine: Engine, batch: Batch) -> float:
    """Take a training step on a micro-batch and return its loss, when the device is done."""
    engine.forward_backward(batch, divisor=batch.num_targets)
    loss = float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
    site.backend.synchronize()
    return loss
