"""What a check of a device is, where it runs, and the engines, micro-batches and gradients that checks share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.checks import Check
from dualtune.engine.backend import Backend, Batch, Engine, LoadRequest
from dualtune.engine.card import Card, Device, card_of
from dualtune.engine.memory.estimate import Ask
from dualtune.engine.memory.shapes import KNOWN
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance_case import gradient_in, norm_of, random_adapter
from dualtune.engine.testing.tiny_models import LLAMA_CONFIG, pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec, Tensors
from dualtune.model.optimizer import OptimizerSpec


@dataclass(frozen=True, slots=True)
class Site:
    """Where a check runs."""

    backend: Backend
    device: Device  # from the backend's card
    sizes: Sizes
    directory: Path  # empty; removed afterwards
    training: Mapping[str, str]  # keys of the config of short runs: model and data

    @property
    def card(self) -> Card:
        return card_of(self.backend.name)


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """One check, before it runs. `run` returns a row of the same name; an exception that it raises is a failure."""

    name: str  # such as "kernels/norms float32"
    title: str
    run: Callable[[Site], Check]
    alone: bool = False  # whether it needs a process in which nothing else has run


def most_apart(dtype: str) -> float:
    """Return how far the losses of a short run may be from those of the same run elsewhere, in nats per token."""
    return tolerances.RESUMED_LOSS if dtype == "float32" else tolerances.LOSS_IN_16_BITS


def judged(name: str, text: str, figures: Mapping[str, Any], limits: Mapping[str, float]) -> Check:
    """Return the row of a check that passes if each figure with a limit is within it. NaN is not."""
    is_within = all(figures[figure] <= most for figure, most in limits.items())
    return Check(name, "ok" if is_within else "fail", text, figures=figures, limits=limits)


# ----------------------------------------------------------------------------------------------------------------------
# How large the models of the checks are, by kind of device: seconds on a CPU, minutes on a GPU.


@dataclass(frozen=True, slots=True)
class TrainedShape:
    """A model with random weights, and the documents of its micro-batches."""

    name: str
    config: Mapping[str, Any]  # config.json
    quantization: str
    lengths: tuple[tuple[int, ...], ...]  # of the documents in tokens, for each micro-batch; they are packed in one row


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes for a kind of device."""

    model: Mapping[str, Any]  # changes of LLAMA_CONFIG, for comparisons
    lengths: tuple[int, ...]  # of their documents
    memory: tuple[TrainedShape, ...]
    speed: TrainedShape
    speed_steps: int


def _published(name: str, quantization: str, *lengths: tuple[int, ...]) -> TrainedShape:
    return TrainedShape(name.split("/")[1], KNOWN[name], quantization, lengths)


_TINY = LLAMA_CONFIG | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 32,
                        "vocab_size": 1024, "max_position_embeddings": 1024}  # fmt: skip
_SMOLLM2, _TINYLLAMA = "HuggingFaceTB/SmolLM2-360M", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
_MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"
_VARIED = ((2048,), (700, 300), (1500,), (450, 450, 450), (1100, 900))  # shapes that an allocator has to fit together
_COMPARED = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "head_dim": 64,
             "vocab_size": 4096, "max_position_embeddings": 2048}  # fmt: skip

SIZES: Mapping[str, Sizes] = {
    "cpu": Sizes(
        model={},
        lengths=(9, 16, 5, 12),
        memory=(TrainedShape("tiny", _TINY, "none", ((160, 96),)),),
        speed=TrainedShape("tiny", _TINY, "none", ((160, 96),)),
        speed_steps=3,
    ),
    "metal": Sizes(
        model=_COMPARED,
        lengths=(200, 317, 64, 129),
        memory=(_published(_SMOLLM2, "none", *_VARIED), _published(_TINYLLAMA, "affine4", *_VARIED)),
        speed=_published(_SMOLLM2, "none", (700, 600, 748)),
        speed_steps=8,
    ),
    "cuda": Sizes(
        model=_COMPARED,
        lengths=(200, 317, 64, 129),
        memory=(
            _published(_SMOLLM2, "none", *_VARIED),
            _published(_TINYLLAMA, "nf4", *_VARIED),
            _published(_MISTRAL, "nf4", (4096,), (2500, 1000)),
        ),
        speed=_published(_TINYLLAMA, "none", (1300, 700, 1000, 1096)),
        speed_steps=20,
    ),
}

# ----------------------------------------------------------------------------------------------------------------------
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


def request_for(model_dir: Path, dtype: str, quantization: str, dropout: float, **changes: Any) -> LoadRequest:
    """Return the request of an engine with AdamW; `changes` are other fields of it."""
    fields: dict[str, Any] = {"init": "pretrained", "seed": SEED} | changes
    adapter = AdapterSpec(rank=RANK, alpha=2.0 * RANK, dropout=dropout, targets=("all-linear",))
    return LoadRequest(
        model_dir=model_dir, dtype=dtype, quantization=quantization, adapter=adapter,
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
