"""What a model with its adapter computes, in a few numbers: written beside the adapter, to be recomputed elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualtune.backend import IGNORE_INDEX, Batch, Engine
from dualtune.data.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "Once upon a time, there was a",
    "Q: What is 7 + 5?\nA:",
)
TOP_K = 5


def fingerprints(engine: Engine, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For each fixed prompt: its token ids, and the most probable next tokens with their log-probabilities."""
    found: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, special=True)
        logprobs_V = engine.logprobs(_batch(ids))[0, -1]
        top = np.argsort(-logprobs_V, kind="stable")[:TOP_K]
        found.append({"tokens": ids.tolist(), "top": [[int(i), round(float(logprobs_V[i]), 6)] for i in top]})
    return found


def _batch(ids: np.ndarray) -> Batch:
    tokens_BT = ids[None]
    ones = np.ones_like(tokens_BT)
    positions_BT = np.arange(len(ids), dtype=np.int32)[None]
    return Batch(tokens_BT, ones * IGNORE_INDEX, ones, positions_BT, np.zeros(ones.shape, np.uint32))
