"""Whether a config fits into the memory of a machine, and what to change if not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dualtune.card import card_of
from dualtune.checks import Check
from dualtune.memory.estimate import Ask, Estimate, estimate, longest_that_fits
from dualtune.memory.shapes import Decoder
from dualtune.platform.budget import Budget
from dualtune.text.show import in_bytes

GRANULE = 64  # tokens; suggestions are multiples of it


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a run needs, by part, and the memory that it may use."""

    estimate: Estimate
    budget: Budget

    @property
    def fits(self) -> bool:
        return self.estimate.total_bytes <= self.budget.bytes


@dataclass(frozen=True, slots=True)
class Smaller:
    """Settings with which a config fits; empty if there are none."""

    settings: Mapping[str, str | int]
    remark: str

    def __str__(self) -> str:
        return " ".join([*(f"--set {key}={value}" for key, value in self.settings.items()), self.remark])


def memory_row(memory: MemoryNeed, decoder: Decoder, ask: Ask) -> Check:
    need, have = in_bytes(memory.estimate.total_bytes), in_bytes(memory.budget.bytes)
    if not memory.budget.bytes:  # no such device: another row reports it
        return Check("memory", "skipped", f"needs {need}; {memory.budget.reason}")
    found = f"needs {need}, has {have} ({memory.budget.reason})"
    if memory.fits:
        return Check("memory", "ok", found)
    return Check("memory", "fail", found, str(smaller(decoder, ask, memory.budget.bytes)))


def smaller(decoder: Decoder, ask: Ask, have_bytes: int) -> Smaller:
    """Return the settings that fit with the least change to the training."""
    return next(_ways(decoder, ask, have_bytes))


def _ways(decoder: Decoder, ask: Ask, have_bytes: int) -> Iterator[Smaller]:
    """Yield settings that fit, those with the least change first; the last one says that there are none."""
    tokens_key, cut = "train.micro_batch_tokens", "fits; longer documents are cut"
    if tokens := most_tokens(decoder, ask, have_bytes):
        yield Smaller({tokens_key: tokens}, "fits, and the result stays the same")
    device = card_of(ask.backend).device(ask.device)
    four_bit = replace(ask, quantization=(device and device.four_bit) or ask.quantization)
    packed: dict[str, str | int] = {"model.quantization": four_bit.quantization}
    can_shrink = ask.quantization == "none" != four_bit.quantization
    if can_shrink:
        if estimate(decoder, four_bit).total_bytes <= have_bytes:
            yield Smaller(packed, "fits")
        if tokens := most_tokens(decoder, four_bit, have_bytes):
            yield Smaller(packed | {tokens_key: tokens}, "fits")
    if length := _longest(decoder, ask, have_bytes):
        yield Smaller({"data.max_length": length, tokens_key: length}, cut)
    if can_shrink and (length := _longest(decoder, four_bit, have_bytes)):
        yield Smaller(packed | {"data.max_length": length, tokens_key: length}, cut)
    yield Smaller({}, "Not even the shortest documents fit: use a smaller model or a larger machine")


def _longest(decoder: Decoder, ask: Ask, have_bytes: int) -> int:
    return longest_that_fits(decoder, ask, have_bytes) // GRANULE * GRANULE


def most_tokens(decoder: Decoder, ask: Ask, have_bytes: int) -> int:
    """Return the largest train.micro_batch_tokens below the given one that fits; 0 if one document is too much."""

    def fits(tokens: int) -> bool:
        return estimate(decoder, replace(ask, micro_batch_tokens=tokens)).total_bytes <= have_bytes

    low, high = ask.max_length, ask.micro_batch_tokens
    if low >= high or not fits(low):
        return 0
    while high - low > GRANULE:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low // GRANULE * GRANULE, ask.max_length)
