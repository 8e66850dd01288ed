"""What a machine can train: the largest model, and the longest document with a 7B model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dualtune.card import driver_of
from dualtune.memory.estimate import Ask, Estimate, estimate, longest_that_fits
from dualtune.memory.shapes import KNOWN, Decoder, decoder_of
from dualtune.platform.budget import budget
from dualtune.platform.machine import Machine
from dualtune.preflight.thresholds import SEVEN_B, device_of

RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEAST_LENGTH = 1024  # tokens: a model that can train only on shorter documents is not recommended


@dataclass(frozen=True, slots=True)
class Largest:
    """A model, the longest document that it can train on here, and the memory for that."""

    name: str
    max_length: int
    estimate: Estimate


def longest_of_7b(machine: Machine) -> int:
    """Return the longest document in tokens for QLoRA of a 7B model here; 0 if not even a short one fits."""
    kind = device_of(machine)
    longest = longest_that_fits(decoder_of(KNOWN[SEVEN_B]), qlora(kind), budget(machine, kind).bytes)
    return min(longest, KNOWN[SEVEN_B]["max_position_embeddings"])


def largest_model(machine: Machine) -> Largest | None:
    """Return the largest published model that QLoRA (rank 16, all seven targets) can train here.

    One document at a time. Only memory counts: on a CPU it would be slow. None if no known model fits.
    """
    kind = device_of(machine)
    have_bytes = budget(machine, kind).bytes
    for name, decoder in _by_size():
        ask = qlora(kind)
        positions = KNOWN[name]["max_position_embeddings"]
        length = min(longest_that_fits(decoder, ask, have_bytes), positions)
        if length >= LEAST_LENGTH:
            return Largest(name, length, estimate(decoder, qlora(kind, length)))
    return None


def qlora(kind: str, length: int = LEAST_LENGTH) -> Ask:
    """Return the setup of 4-bit training on documents of up to `length` tokens, one at a time, on a device."""
    card = driver_of(kind)
    device = card.device(kind)
    assert device is not None  # since the card is for this kind
    return Ask(
        backend=card.name,
        device=kind,
        quantization=device.four_bit or "none",
        dtype=device.auto_dtype,
        rank=RANK,
        targets=TARGETS,
        micro_batch_tokens=length,
        max_length=length,
    )


@cache
def _by_size() -> tuple[tuple[str, Decoder], ...]:
    """Return the published models, largest first."""
    decoders = {name: decoder_of(config) for name, config in KNOWN.items()}
    return tuple(sorted(decoders.items(), key=lambda item: -item[1].num_parameters))
