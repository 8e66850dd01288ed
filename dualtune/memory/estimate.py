"""An estimate of the memory of a training step, by formula, before anything is loaded.

docs/memory.md lists what a formula cannot know; `benchmarks/memory_estimate.py` compares the estimate with the engines'
actual memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dualtune.activation_checkpointing import KEEP_ALL, ActivationCheckpointing
from dualtune.card import MemoryFormulas, card_of
from dualtune.errors import ConfigError
from dualtune.memory.ask import Adapted, Ask, Estimate, adapted, padded, tokens_at_once
from dualtune.memory.counted import Shape
from dualtune.memory.shapes import Decoder
from dualtune.optimizer import rule_of

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.config.schema import CheckpointedLayers

__all__ = ["Adapted", "Ask", "Estimate", "adapted", "ask_of", "estimate", "longest_that_fits", "padded"]

FULL = ActivationCheckpointing("all")
SHORTEST, LONGEST = 64, 1 << 20  # tokens; the range of `longest_that_fits`


def estimate(decoder: Shape, ask: Ask) -> Estimate:
    """Return the peak of a training step. ConfigError if a target selects nothing or the backend has no formulas."""
    formulas = _formulas(ask.backend)
    parts = formulas.parts if isinstance(decoder, Decoder) else formulas.counted_parts
    if parts is None:
        raise ConfigError(f"memory: the backend '{ask.backend}' has no formulas for a model of this family")
    return Estimate(parts(decoder, ask))


def _formulas(backend: str) -> MemoryFormulas:
    found = card_of(backend).memory
    if found is None:
        raise ConfigError(f"memory: the backend '{backend}' has no formulas, so there is no estimate for it")
    return found


def ask_of(config: Config, decoder: Shape, backend: str, device: str) -> Ask:
    """Return the `Ask` of a config. A base with quantization as stored ("auto") counts as not quantized.

    ConfigError if a target selects nothing, or if the backend lacks the device or the quantization.
    """
    quantization = "none" if config.model.quantization == "auto" else config.model.quantization
    on = card_of(backend).device(device)
    if on is None:
        kinds = ", ".join(each.kind for each in card_of(backend).devices) or "none"
        raise ConfigError(f"device: got '{device}', the backend '{backend}' has: {kinds}")
    if quantization not in on.quantizations:
        allowed = ", ".join(("auto", *on.quantizations))
        raise ConfigError(f"model.quantization: got '{quantization}', the backend '{backend}' honours: {allowed}")
    if not config.adapter.trains_model:
        adapted(decoder, config.adapter.targets)
    longest = config.data.max_length
    return Ask(
        backend=backend,
        device=device,
        quantization=quantization,
        dtype=on.auto_dtype if config.model.dtype == "auto" else config.model.dtype,
        rank=config.adapter.rank,
        method=config.adapter.method,
        checkpointing=checkpointing_of(config),
        resident_layers=config.memory.resident_layers_or_none,
        targets=config.adapter.targets,
        micro_batch_tokens=tokens_at_once(config.train.micro_batch_tokens, longest),
        max_length=longest,
        packing=config.data.packing,
        kernels=config.model.kernels,
        dropout=config.adapter.dropout > 0 and not config.adapter.trains_model,
        optimizer=rule_of(config.train.optimizer, config.train.schedule),
        averages=config.train.average != "none",
    )


def checkpointing_of(config: Config) -> ActivationCheckpointing:
    """Return memory.checkpointing as configured; `auto` counts as none, or as full if another key needs it.

    ConfigError for a value that contradicts memory.resident_layers or memory.offload.
    """
    memory = config.memory
    offload, streamed = memory.offload == "activations", memory.resident_layers != "all"
    if streamed or (offload and memory.checkpointing in ("auto", "none", "remade")):
        where = f"memory.resident_layers={memory.resident_layers}" if streamed else "memory.offload=activations"
        return replace(_full_because(memory.checkpointing, where), offload=offload)
    match value := memory.checkpointing:
        case "auto" | "none":
            return KEEP_ALL
        case "remade":
            return ActivationCheckpointing(remade=True)
        case "full":
            return replace(FULL, offload=offload)
        case _:
            return ActivationCheckpointing(value.layers, value.every, offload=offload)


def _full_because(value: str | CheckpointedLayers, where: str) -> ActivationCheckpointing:
    """Return that everything is recomputed, because another key needs it. ConfigError for a value that is against it.

    The backward pass of a streamed layer follows its recomputation; and what is offloaded are inputs of recomputed
    layers.
    """
    if value not in ("auto", "full"):
        got = value if isinstance(value, str) else f"{{layers: {value.layers}}}"
        raise ConfigError(
            f"memory.checkpointing: got {got}, but with {where} layers have to be recomputed; allowed: auto, full"
        )
    return FULL if value == "full" else replace(FULL, reason=f"auto: needed by {where}")


def longest_that_fits(decoder: Shape, ask: Ask, budget_bytes: int) -> int:
    """Return the tokens of the longest document that fits in the budget, if it is the only one in its micro-batch.

    0 if not even 64 tokens fit. The model's limit of positions is not considered.
    """

    def fits(length: int) -> bool:
        alone = replace(ask, max_length=length, micro_batch_tokens=length)
        return estimate(decoder, alone).total_bytes <= budget_bytes

    starts = [SHORTEST, *(border + 1 for border in _formulas(ask.backend).borders), LONGEST + 1]
    longest = (last_that_fits(fits, low, high) for low, high in reversed([*pairwise(starts)]) if fits(low))
    return next(longest, 0)


def last_that_fits(fits: Callable[[int], bool], low: int, high: int, granule: int = 1) -> int:
    """Return the largest number in [low, high) that fits, to a granule, by bisection.

    `low` must fit, and beyond a number that does not fit, none does.
    """
    while high - low > granule:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
