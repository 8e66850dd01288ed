"""AdamW with its state in 8-bit codes (`dualtune/optimizer/eight_bit.py`), for one flat tensor, chunk by chunk.

Blocks are those of each tensor in the flat one, so the codes are the same in every layout. Neighbours whose sizes are
multiples of a block form one span, which is updated in chunks: no slot is ever there in float32 as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dualtune.optimizer import OptimizerSpec
from dualtune.optimizer.eight_bit import BLOCK, CODES, STEP_STRIDE, EightBitCode, chunks_of, dither
from dualtune_torch.card.sizes import UPDATE_CHUNK

SIGN, MAGNITUDE = -(1 << 31), 0x7FFFFFFF


class CodedSlot:
    """A slot of one flat tensor, as codes and tops."""

    def __init__(self, code: EightBitCode, num_values: int, num_blocks: int, device: torch.device) -> None:
        self.code = code
        self.codes = torch.zeros(num_values, dtype=torch.int8 if code.is_signed else torch.uint8, device=device)
        self.tops = torch.zeros(num_blocks, dtype=torch.int16, device=device)
        self._place = torch.from_numpy(dither(code, 0)).to(device)

    def decode(self, values: slice, blocks: slice) -> Tensor:
        """Return float32 values."""
        return decode(self.codes[values], self.tops[blocks], self.code)

    def encode(self, new: Tensor, values: slice, blocks: slice, step: Tensor, is_good: Tensor) -> None:
        """Store float32 values after update `step`, int64. If `is_good` is false, change nothing."""
        added = (self._place + (step * STEP_STRIDE & self.code.dither_mask)) & self.code.dither_mask
        codes, tops = encode(new, self.code, added.int())
        for stored, found in ((self.codes[values], codes), (self.tops[blocks], tops)):
            stored.copy_(torch.where(is_good, found, stored))


class EightBitAdamW:
    """See `dualtune_torch.optimizer.FlatOptimizer`."""

    def __init__(self, flat: Tensor, sizes: Sequence[int], spec: OptimizerSpec) -> None:
        self._flat, self._settings = flat, spec.settings
        self._chunks = list(chunks_of(sizes, UPDATE_CHUNK[flat.device.type]))
        self.count = torch.zeros((), device=flat.device)
        num_blocks = sum(-(-(values.stop - values.start) // BLOCK) for values, _ in self._chunks)
        self._slots = {slot: CodedSlot(CODES[slot], flat.numel(), num_blocks, flat.device) for slot in spec.entry.slots}

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        assert self._flat.grad is not None
        step = self.count.long() + 1
        for values, blocks in self._chunks:
            self._update(values, blocks, lr, step, is_good)
        self.count += is_good
        self._flat.grad.zero_()

    def _update(self, values: slice, blocks: slice, lr: float, step: Tensor, is_good: Tensor) -> None:
        """AdamW of a chunk: `dualtune.optimizer.adamw_8bit`."""
        assert self._flat.grad is not None
        settings, m_slot, root_slot = self._settings, self._slots["m"], self._slots["root_v"]
        beta1, beta2 = settings["beta1"], settings["beta2"]
        correction1, correction2 = (-torch.expm1(step.double() * math.log(beta)) for beta in (beta1, beta2))
        w, g = self._flat.detach()[values], self._flat.grad[values]
        m = m_slot.decode(values, blocks).mul_(beta1).add_(g, alpha=1 - beta1)
        root_v = root_slot.decode(values, blocks).square_().mul_(beta2).addcmul_(g, g, value=1 - beta2).sqrt_()
        change = (root_v / correction2.sqrt()).add_(settings["eps"]).reciprocal_().mul_(m).mul_(lr / correction1)
        w.copy_(torch.where(is_good, (w * (1 - lr * settings["weight_decay"])).sub_(change), w))
        del change
        m_slot.encode(m, values, blocks, step, is_good)
        root_slot.encode(root_v, values, blocks, step, is_good)

    def read(self, slot: str) -> Tensor:
        flat = torch.empty(self._flat.numel())
        for values, blocks in self._chunks:
            flat[values] = self._slots[slot].decode(values, blocks).cpu()
        return flat

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        flat, always = torch.empty(self._flat.numel()), torch.tensor(True, device=self._flat.device)
        fill(flat)
        for values, blocks in self._chunks:
            self._slots[slot].encode(flat[values].to(self._flat.device), values, blocks, self.count.long(), always)

    def tensors(self) -> Iterator[Tensor]:
        for slot in self._slots.values():
            yield from (slot.codes, slot.tops)


def encode(values: Tensor, code: EightBitCode, dither: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes int8 or uint8 [N], tops int16 [blocks]) of float32 values [N]: as `encode` of the core."""
    bits = functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK).view(torch.int32)
    index = (bits & MAGNITUDE).add_(dither).bitwise_right_shift_(code.shift).clamp_(max=code.largest_index)
    index.mul_(index >= code.smallest_index)
    top = index.amax(1, keepdim=True)
    codes = (index - top + code.largest).clamp_(min=int(code.keeps_small)).mul_(index > 0)
    if code.is_signed:
        codes = torch.where(bits < 0, -codes, codes)
    return codes.to(torch.int8 if code.is_signed else torch.uint8).view(-1)[: len(values)], top.short().view(-1)


def decode(codes: Tensor, tops: Tensor, code: EightBitCode) -> Tensor:
    """Return float32 values [N] of codes [N] and tops [blocks]: as `decode` of the core."""
    wide = functional.pad(codes, (0, -len(codes) % BLOCK)).view(-1, BLOCK).int()
    magnitude = wide.abs()
    bits = (magnitude + (tops.int() - code.largest)[:, None]).bitwise_left_shift_(code.shift).mul_(magnitude > 0)
    if code.is_signed:
        bits |= wide & SIGN
    return bits.view(torch.float32).view(-1)[: len(codes)]
