"""The floating-point operations of training a LoRA adapter, by formula.

PaLM's model FLOPs (Chowdhery et al., arXiv 2204.02311, appendix B), for a frozen base: 2 per token and parameter of a
matrix product in the forward pass, as many in the backward pass for the gradient of its input, and the gradient of the
weight only for the adapter. Attention is counted for the tokens that a token may see; its backward pass has 5 matrix
products for the forward pass's 2, as FlashAttention computes it (Dao, arXiv 2307.08691, section 4.1).

Operations that an implementation skips (output rows of tokens that are not targets) or repeats (activation
checkpointing) change its speed, not this count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.backend import Batch
from dualtune.memory.shapes import UnknownShape, any_decoder

TOLERANCE = 0.02  # of the parameters: norms, biases, position embeddings


class NoFormula(Exception):
    """The formula does not cover the model, or its config is incomplete. The message says which."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder-only transformer and its adapter."""

    matmul_parameters: int  # N: of all matrix products, with the output head; the input embedding is only a look-up
    adapter_parameters: int  # P
    attention_width: int  # heads · head size
    windows: tuple[int | None, ...]  # per layer, how many tokens a token sees; None: itself and all before it
    is_trained: bool = False  # whether the model itself is trained; it has no adapter then


@dataclass(frozen=True, slots=True)
class Flops:
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def training_flops(shape: Shape, lengths: np.ndarray) -> Flops:
    """Return the FLOPs for documents of these lengths in tokens, int [documents], each of which sees only itself."""
    tokens = float(lengths.sum())
    base, adapter = 2 * shape.matmul_parameters * tokens, 2 * shape.adapter_parameters * tokens
    # q·k and the weighted sum of v: one multiplication and one addition each, for every pair of tokens.
    attention = 4 * shape.attention_width * float(sum(_pairs(lengths, window) for window in shape.windows))
    of_base = (2 if shape.is_trained else 1) * base  # gradients of the inputs, and of the weights
    return Flops(forward=base + adapter + attention, backward=of_base + 2 * adapter + 2.5 * attention)


def _pairs(lengths: np.ndarray, window: int | None) -> int:
    """Return the number of pairs (a token, a token that it sees) in the documents."""
    n = lengths.astype(np.int64)
    seen = n if window is None else np.minimum(n, window)
    return int((seen * (seen + 1) // 2 + (n - seen) * seen).sum())


def document_lengths(batches: Iterable[Batch]) -> np.ndarray:
    """Return the tokens of every document in the micro-batches, int64 [documents]."""
    rows = [row for batch in batches for row in batch.segments_BT]
    return np.concatenate([np.bincount(row)[1:] for row in rows]) if rows else np.zeros(0, np.int64)


def read_shape(model_dir: Path, *, num_parameters: int, adapter_parameters: int) -> Shape:
    """Return the shape from config.json, checked against the engine's number of parameters.

    `adapter_parameters`: those that are trained; all of the model's if it is trained whole.

    That number decides whether the feed-forward block has two matrices or three, and whether the output head is the
    embedding. NoFormula if no combination fits: then the model has other parts.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        decoder = any_decoder(config)
    except UnknownShape as error:
        raise NoFormula(str(error)) from None
    tied = [decoder.tied] if "tie_word_embeddings" in config else [True, False]
    # GPT-2's feed-forward block has two matrices, SwiGLU's three.
    shapes = [replace(decoder, tied=is_tied, gated=is_gated) for is_tied in tied for is_gated in (False, True)]
    gap, shape = min(
        ((abs(num_parameters - s.linear_parameters - s.table_parameters), s) for s in shapes), key=lambda pair: pair[0]
    )
    if gap > TOLERANCE * num_parameters:
        raise NoFormula(
            f"its {num_parameters:,} parameters do not match a dense decoder with the shapes in config.json"
        )
    matmul_parameters = shape.linear_parameters + shape.vocab * shape.hidden
    windows = _windows(config, shape.layers)
    if adapter_parameters == num_parameters:
        return Shape(matmul_parameters, 0, shape.width, windows, is_trained=True)
    return Shape(matmul_parameters, adapter_parameters, shape.width, windows)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    types = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * layers
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise NoFormula(f"it has layers of type {', '.join(sorted(unknown))}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
