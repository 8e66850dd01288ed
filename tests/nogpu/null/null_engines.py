"""Engines with random weights on the null GPU, and micro-batches for them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualtune.engine.backend import Batch, LoadRequest
from dualtune.engine.memory.shapes import KNOWN
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune_torch.backend import TorchBackend

SMOLLM = "HuggingFaceTB/SmolLM2-135M"
PROMPT_SHARE = 3  # a third of each document is a prompt
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is not replaced; dualtune's own attention does not use it


def shape(name: str = SMOLLM, layers: int | None = None) -> dict[str, Any]:
    """The config.json of a model, maybe with fewer layers."""
    return dict(KNOWN[name]) | ({} if layers is None else {"num_hidden_layers": layers})


def load(
    config: Mapping[str, Any], *, device: str = "cuda", rank: int = 16, dropout: float = 0.05, **options: Any
) -> Any:
    """Return an engine with LoRA on all linear layers. `options` are those of `LoadRequest`."""
    adapter = AdapterSpec(rank=rank, alpha=2.0 * rank, dropout=dropout, targets=("all-linear",))
    options = {"dtype": "bfloat16", "quantization": "none", "init": "random", "seed": 0} | options
    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(config))
        return TorchBackend(device).load(
            LoadRequest(Path(place), adapter=adapter, optimizer=OptimizerSpec(), **options)
        )


def batch(tokens: int, *, rows: int = 1, documents: int = 8, prompts: bool = True, seed: int = 0) -> Batch:
    """Rows of documents of equal length, a few tokens of padding at the end of each row."""
    random = np.random.default_rng(seed)
    segments, positions = np.zeros((rows, tokens), np.int32), np.zeros((rows, tokens), np.int32)
    borders = np.linspace(0, tokens - 5, documents + 1).astype(int)
    for number, (start, end) in enumerate(pairwise(borders), 1):
        segments[:, start:end], positions[:, start:end] = number, np.arange(end - start)
    ids = random.integers(0, 90, (rows, tokens)).astype(np.int32)
    first = tokens // documents // PROMPT_SHARE if prompts else -1
    labels = np.where((segments > 0) & (positions > first), ids, -100).astype(np.int32)
    return Batch(ids, labels, segments, positions, random.integers(0, 1 << 32, (rows, tokens), np.uint32))


def step(engine: Any, micro_batch: Batch) -> None:
    """A micro-batch, and the optimizer."""
    engine.forward_backward(micro_batch, divisor=float(micro_batch.num_targets))
    engine.optim_step(lr=1e-4, max_grad_norm=0.3)
