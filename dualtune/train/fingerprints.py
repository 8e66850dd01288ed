"""What a model with its adapter computes, in a few numbers: written beside the adapter, to be recomputed elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualtune.backend import IGNORE_INDEX, Batch, Engine
from dualtune.data.tokenizer import Tokenizer
from dualtune.errors import NonFiniteError

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
        if not np.isfinite(logprobs_V[top]).all():
            raise NonFiniteError(
                f"the log-probabilities after {prompt!r} are not finite. No adapter was written. "
                "Lower train.learning_rate, or use model.dtype: float32"
            )
        found.append({"tokens": ids.tolist(), "top": [[int(i), round(float(logprobs_V[i]), 6)] for i in top]})
    return found


def base_fingerprints(engine: Engine, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The same for the base model alone: with B = 0 the adapter adds nothing."""
    state = engine.adapter_state()
    engine.load_adapter_state({name: w * ("lora_A" in name) for name, w in state.items()})
    found = fingerprints(engine, tokenizer)
    engine.load_adapter_state(state)
    return found


def _batch(ids: np.ndarray) -> Batch:
    tokens_BT = ids[None]
    ones = np.ones_like(tokens_BT)
    positions_BT = np.arange(len(ids), dtype=np.int32)[None]
    return Batch(tokens_BT, ones * IGNORE_INDEX, ones, positions_BT, np.zeros(ones.shape, np.uint32))
