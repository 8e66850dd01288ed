"""How much memory a training step needs, by formula, before anything is loaded.

What a formula cannot know is said in docs/memory.md; `benchmarks/memory_estimate.py` holds the estimate against what
the engines take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dualtune.errors import ConfigError
from dualtune.memory import mlx_parts, torch_parts
from dualtune.memory.ask import Adapted, Ask, Estimate, Part, adapted, padded, tokens_at_once
from dualtune.memory.shapes import Decoder

if TYPE_CHECKING:
    from dualtune.config import Config

__all__ = ["Adapted", "Ask", "Estimate", "Part", "adapted", "ask_of", "estimate", "longest_that_fits", "padded"]

SHORTEST, LONGEST = 64, 1 << 20  # tokens, of what `longest_that_fits` looks at

PARTS: Mapping[str, Callable[[Decoder, Ask], tuple[Part, ...]]] = {
    "torch": torch_parts.parts,
    "mlx": mlx_parts.parts,
}
DTYPES = {"cuda": "bfloat16", "metal": "bfloat16", "cpu": "float32"}  # what the engines take for "auto"
QUANTIZATIONS = {"torch": ("none", "nf4", "affine4", "affine8"), "mlx": ("none", "affine4", "affine8")}


def estimate(decoder: Decoder, ask: Ask) -> Estimate:
    """The peak of a training step. ConfigError for a target that selects nothing."""
    return Estimate(PARTS[ask.backend](decoder, ask))


def ask_of(config: Config, decoder: Decoder, backend: str, device: str) -> Ask:
    """What a config asks for. A base whose quantization is as stored ("auto") counts as not quantized.

    ConfigError for a target that selects nothing, and for a quantization that the backend has not.
    """
    quantization = "none" if config.model.quantization == "auto" else config.model.quantization
    if quantization not in QUANTIZATIONS[backend]:
        allowed = ", ".join(("auto", *QUANTIZATIONS[backend]))
        raise ConfigError(f"model.quantization: got '{quantization}', the backend '{backend}' honours: {allowed}")
    adapted(decoder, config.adapter.targets)
    longest = config.data.max_length
    return Ask(
        backend=backend,
        device=device,
        quantization=quantization,
        dtype=DTYPES[device] if config.model.dtype == "auto" else config.model.dtype,
        rank=config.adapter.rank,
        method=config.adapter.method,
        targets=config.adapter.targets,
        micro_batch_tokens=tokens_at_once(config.train.micro_batch_tokens, longest),
        max_length=longest,
        packing=config.data.packing,
        kernels=config.model.kernels,
        dropout=config.adapter.dropout > 0,
        optimizer=config.train.optimizer,
    )


def longest_that_fits(decoder: Decoder, ask: Ask, budget_bytes: int) -> int:
    """The tokens of the longest document that, alone in a micro-batch, can be trained on within a budget.

    0 where not even one of 64 tokens can. What the model's positions allow is not looked at.
    """

    def fits(length: int) -> bool:
        alone = replace(ask, max_length=length, micro_batch_tokens=length)
        return estimate(decoder, alone).total_bytes <= budget_bytes

    # MLX holds the scores of documents up to a chunk, and makes those of longer ones again: less is kept from there on.
    border = mlx_parts.ATTENTION_CHUNK
    for low, high in ((border + 1, LONGEST + 1), (SHORTEST, border + 1)):
        if fits(low):
            return _last(fits, low, high)
    return 0


def _last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number that fits from `low` on, which does, below `high`, by halving: beyond one that does not fit,
    none does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
