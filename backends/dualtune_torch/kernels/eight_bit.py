"""AdamW and Lion with their state in 8-bit codes (`dualtune/model/eight_bit.py`), for one flat tensor, chunk by chunk.

Blocks are those of each tensor in the flat one, so the codes are the same in every layout. Neighbours whose sizes are
multiples of a block form one span, which is updated in chunks: no slot is ever there in float32 as a whole.

Legend: N values of a chunk, R its blocks, C the values of a block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dualtune.model.eight_bit import BLOCK, CODES, STEP_STRIDE, EightBitCode, chunks_of, dither
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.update_rules import Settings
from dualtune_torch.card.memory import UPDATE_CHUNK

SIGN, MAGNITUDE = -(1 << 31), 0x7FFFFFFF


class CodedSlot:
    """A slot of one flat tensor, as codes and tops."""

    def __init__(self, code: EightBitCode, num_values: int, num_blocks: int, device: torch.device) -> None:
        self.code = code
        self.codes = torch.zeros(num_values, dtype=torch.int8 if code.is_signed else torch.uint8, device=device)
        self.tops = torch.zeros(num_blocks, dtype=torch.int16, device=device)
        self._place = torch.from_numpy(dither(code, 0)).to(device)

    def dither(self, step: Tensor) -> Tensor:
        """Return int32 [C]. `step` is int64."""
        moved = step * STEP_STRIDE & self.code.dither_mask  # before it meets int32
        return ((self._place + moved) & self.code.dither_mask).int()

    def read(self, values: slice, blocks: slice) -> tuple[Tensor, Tensor]:
        """Return (codes [R, C], tops [R]) of a chunk."""
        return as_blocks(self.codes[values]), self.tops[blocks]

    def write(self, codes: Tensor, tops: Tensor, values: slice, blocks: slice) -> None:
        write_blocks(codes, self.codes[values])
        self.tops[blocks] = tops


class EightBit(ABC):
    """See `dualtune_torch.optimizer.FlatOptimizer`."""

    def __init__(self, flat: Tensor, sizes: Sequence[int], spec: OptimizerSpec) -> None:
        self._flat, self._settings = flat, spec.settings
        self._chunks = list(chunks_of(sizes, UPDATE_CHUNK[flat.device.type]))
        self.count = torch.zeros((), device=flat.device)
        num_blocks = self._chunks[-1][1].stop
        self._slots = {slot: CodedSlot(CODES[slot], flat.numel(), num_blocks, flat.device) for slot in spec.entry.slots}

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        assert self._flat.grad is not None
        step = self.count.long() + 1
        numbers = self._numbers(lr, step)
        dithers = [slot.dither(step) for slot in self._slots.values()]
        for values, blocks in self._chunks:
            self._update(values, blocks, *dithers, *numbers, is_good)
        self.count += is_good
        self._flat.grad.zero_()

    @abstractmethod
    def _numbers(self, lr: float, step: Tensor) -> tuple[Tensor, ...]:
        """Return what the formula takes of learning rate and step, on the device."""

    @abstractmethod
    def _updated(self, w: Tensor, g: Tensor, *state_and_numbers: Tensor) -> tuple[Tensor, ...]:
        """Return (w, codes and tops of each slot) of a chunk."""

    def _update(self, values: slice, blocks: slice, *numbers: Tensor) -> None:
        """Update a chunk. Its temporaries are freed before the next one."""
        assert self._flat.grad is not None
        w, g = self._flat.detach()[values], self._flat.grad[values]
        state = [tensor for slot in self._slots.values() for tensor in slot.read(values, blocks)]
        new_w, *new = self._updated(as_blocks(w), as_blocks(g), *state, *numbers)
        write_blocks(new_w, w)
        for slot, codes, tops in zip(self._slots.values(), new[::2], new[1::2], strict=True):
            slot.write(codes, tops, values, blocks)

    def read(self, slot: str) -> Tensor:
        flat, coded = torch.empty(self._flat.numel()), self._slots[slot]
        for values, blocks in self._chunks:
            write_blocks(decode(*coded.read(values, blocks), coded.code).cpu(), flat[values])
        return flat

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        flat, coded = torch.empty(self._flat.numel()), self._slots[slot]
        fill(flat)
        added = coded.dither(self.count.long())
        for values, blocks in self._chunks:
            new = as_blocks(flat[values]).to(self._flat.device)
            coded.write(*encode(new, added, coded.code), values, blocks)

    def tensors(self) -> Iterator[Tensor]:
        for slot in self._slots.values():
            yield from (slot.codes, slot.tops)


class EightBitAdamW(EightBit):
    def _numbers(self, lr: float, step: Tensor) -> tuple[Tensor, ...]:
        """Return (lr / (1 − β1^step), √(1 − β2^step), 1 − lr · decay)."""
        settings = self._settings
        one, two = (-torch.expm1(step.double() * math.log(settings[beta])) for beta in ("beta1", "beta2"))
        return (lr / one).float(), two.sqrt().float(), torch.full_like(one, 1 - lr * settings["weight_decay"])

    def _updated(self, w: Tensor, g: Tensor, *state_and_numbers: Tensor) -> tuple[Tensor, ...]:
        return adamw(w, g, *state_and_numbers, settings=self._settings)


class EightBitLion(EightBit):
    def _numbers(self, lr: float, step: Tensor) -> tuple[Tensor, ...]:
        """Return (lr, 1 − lr · decay)."""
        return tuple(
            torch.full_like(step, x, dtype=torch.float32) for x in (lr, 1 - lr * self._settings["weight_decay"])
        )

    def _updated(self, w: Tensor, g: Tensor, *state_and_numbers: Tensor) -> tuple[Tensor, ...]:
        return lion(w, g, *state_and_numbers, settings=self._settings)


def adamw(
    w: Tensor, g: Tensor, m_codes: Tensor, m_tops: Tensor, v_codes: Tensor, v_tops: Tensor,
    m_dither: Tensor, v_dither: Tensor, rate: Tensor, root: Tensor, shrink: Tensor, is_good: Tensor,
    *, settings: Settings,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (w, m's codes and tops, those of root_v) after `dualtune.model.update_rules.adamw_root`, or the old ones.

    w, g and codes are [R, C]; rate = lr / (1 − β1^step), root = √(1 − β2^step), shrink = 1 − lr · decay.
    """
    beta1, beta2, eps = (settings[name] for name in ("beta1", "beta2", "eps"))
    m = decode(m_codes, m_tops, CODES["m"]).mul_(beta1).add_(g, alpha=1 - beta1)
    root_v = decode(v_codes, v_tops, CODES["root_v"]).square_().mul_(beta2).addcmul_(g, g, value=1 - beta2).sqrt_()
    change = (root_v / root).add_(eps).reciprocal_().mul_(m).mul_(rate)
    new_w = torch.where(is_good, (w * shrink).sub_(change), w)
    del change
    before = m_codes, m_tops, v_codes, v_tops
    after = *encode(m, m_dither, CODES["m"]), *encode(root_v, v_dither, CODES["root_v"])
    return new_w, *(torch.where(is_good, new, old) for new, old in zip(after, before, strict=True))


def lion(
    w: Tensor, g: Tensor, m_codes: Tensor, m_tops: Tensor, m_dither: Tensor, rate: Tensor, shrink: Tensor,
    is_good: Tensor, *, settings: Settings,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (w, m's codes and tops) after `dualtune.model.update_rules.lion`, or the old ones; shapes as above."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    m = decode(m_codes, m_tops, CODES["m"])
    change = (m * beta1).add_(g, alpha=1 - beta1).sign_().mul_(rate)
    new_w = torch.where(is_good, (w * shrink).sub_(change), w)
    del change
    after = encode(m.mul_(beta2).add_(g, alpha=1 - beta2), m_dither, CODES["m"])
    return new_w, *(torch.where(is_good, new, old) for new, old in zip(after, (m_codes, m_tops), strict=True))


def encode(values: Tensor, dither: Tensor, code: EightBitCode) -> tuple[Tensor, Tensor]:
    """Return (codes int8 or uint8 [R, C], tops int16 [R]) of float32 values [R, C]: as `encode` of the core."""
    bits = values.view(torch.int32)
    index = (bits & MAGNITUDE).add_(dither).bitwise_right_shift_(code.shift).clamp_(max=code.largest_index)
    functional.threshold(index, code.smallest_index - 1, 0, inplace=True)
    top = index.amax(1, keepdim=True)
    codes = (index - (top - code.largest).clamp_(min=0)).clamp_(min=int(code.keeps_small))  # a top of 0: only zeros
    if code.keeps_small:
        codes.mul_(index > 0)
    if code.is_signed:
        codes = torch.where(bits < 0, -codes, codes)
    return codes.to(torch.int8 if code.is_signed else torch.uint8), top.view(-1).to(torch.int16)


def decode(codes: Tensor, tops: Tensor, code: EightBitCode) -> Tensor:
    """Return float32 values [R, C] of codes [R, C] and tops [R]: as `decode` of the core."""
    wide = codes.to(torch.int32)
    magnitude = wide.abs() if code.is_signed else wide
    bits = (magnitude + (tops.to(torch.int32) - code.largest)[:, None]).bitwise_left_shift_(code.shift)
    bits.mul_(magnitude > 0)
    if code.is_signed:
        bits |= wide & SIGN
    return bits.view(torch.float32)


def as_blocks(flat: Tensor) -> Tensor:
    """Return [R, C]: a view where the last block is whole, else a copy filled up with zeros."""
    return functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK) if len(flat) % BLOCK else flat.view(-1, BLOCK)


def write_blocks(blocks: Tensor, into: Tensor) -> None:
    into.copy_(blocks.view(-1)[: len(into)])
