"""How large the models of the checks are, by kind of device: seconds on a CPU, minutes on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualtune.memory.shapes import KNOWN
from dualtune.testing.tiny_models import LLAMA_CONFIG


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


def _known(name: str, quantization: str, *lengths: tuple[int, ...]) -> TrainedShape:
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
        memory=(_known(_SMOLLM2, "none", *_VARIED), _known(_TINYLLAMA, "affine4", *_VARIED)),
        speed=_known(_SMOLLM2, "none", (700, 600, 748)),
        speed_steps=8,
    ),
    "cuda": Sizes(
        model=_COMPARED,
        lengths=(200, 317, 64, 129),
        memory=(
            _known(_SMOLLM2, "none", *_VARIED),
            _known(_TINYLLAMA, "nf4", *_VARIED),
            _known(_MISTRAL, "nf4", (4096,), (2500, 1000)),
        ),
        speed=_known(_TINYLLAMA, "none", (1300, 700, 1000, 1096)),
        speed_steps=20,
    ),
}
