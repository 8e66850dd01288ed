"""An optimizer with its state in 8-bit codes (`dualtune/model/eight_bit.py`), for one flat array, chunk by chunk.

Blocks are those of each tensor in the flat array, so the codes are the same in every layout. Each chunk replaces its
part of the arrays: no slot is ever there in float32 as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx

from dualtune.model.eight_bit import BLOCK, CODES, STEP_STRIDE, EightBitCode, chunks_of, dither

Arrays = dict[str, mx.array]
Put = Callable[[mx.array, slice, mx.array], mx.array]  # (array, where, new) -> the array with the new values there
SIGN, MAGNITUDE = -(1 << 31), 0x7FFFFFFF


def zero_slots(slots: Iterable[str], sizes: Iterable[int]) -> Arrays:
    """Return the slots before the first update: codes and tops of each, by the names that `decode_slot` reads."""
    chunks = list(chunks_of(sizes, BLOCK))
    num_values = chunks[-1][0].stop if chunks else 0
    return {
        name: array
        for slot, code in ((slot, CODES[slot]) for slot in slots)
        for name, array in (
            (slot, mx.zeros(num_values, mx.int8 if code.is_signed else mx.uint8)),
            (tops_of(slot), mx.zeros(len(chunks), mx.int16)),
        )
    }


def tops_of(slot: str) -> str:
    """The name of the array with a slot's tops."""
    return f"{slot}_tops"


def decode_slot(slots: Arrays, slot: str, values: slice, blocks: slice) -> mx.array:
    """Return a chunk of a slot in float32."""
    return decode(slots[slot][values], slots[tops_of(slot)][blocks], CODES[slot])


def encode_slot(
    slots: Arrays, slot: str, new: mx.array, values: slice, blocks: slice, step: mx.array, put: Put
) -> Arrays:
    """Return the slots with new float32 values in a chunk of one, after update `step`."""
    codes, tops = encode(new, CODES[slot], step)
    name = tops_of(slot)
    return slots | {slot: put(slots[slot], values, codes), name: put(slots[name], blocks, tops)}


def replaced(array: mx.array, where: slice, new: mx.array) -> mx.array:
    """Return an array with other values in a part of it."""
    if where == slice(0, array.size):
        return new
    return mx.slice_update(array, new, mx.array([where.start]), axes=[0])


def put_in_place(array: mx.array, where: slice, new: mx.array) -> mx.array:
    """Write values into a part of an array itself.

    They are evaluated first: MLX copies an array, as a whole, that something else has still to read.
    """
    mx.eval(new)
    array[where] = new
    return array


def encode(values: mx.array, code: EightBitCode, step: mx.array) -> tuple[mx.array, mx.array]:
    """Return (codes int8 or uint8 [N], tops int16 [blocks]) of float32 values [N]: as `encode` of the core."""
    bits = mx.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK).view(mx.int32)
    # Products of int32 wrap at 2^32, which the mask does not see.
    added = (mx.array(dither(code, 0)) + step.astype(mx.int32) * STEP_STRIDE) & code.dither_mask
    index = mx.minimum(((bits & MAGNITUDE) + added) >> code.shift, code.largest_index)
    index = mx.where(index < code.smallest_index, 0, index)
    top = index.max(axis=1, keepdims=True)
    codes = mx.where(index > 0, mx.maximum(index - top + code.largest, int(code.keeps_small)), 0)
    if code.is_signed:
        codes = mx.where(bits < 0, -codes, codes)
    return codes.astype(mx.int8 if code.is_signed else mx.uint8).reshape(-1)[: values.size], top[:, 0].astype(mx.int16)


def decode(codes: mx.array, tops: mx.array, code: EightBitCode) -> mx.array:
    """Return float32 values [N] of codes [N] and tops [blocks]: as `decode` of the core."""
    wide = mx.pad(codes, (0, -codes.size % BLOCK)).reshape(-1, BLOCK).astype(mx.int32)
    magnitude = mx.abs(wide)
    bits = (magnitude + (tops.astype(mx.int32) - code.largest)[:, None]) << code.shift
    bits = mx.where(magnitude > 0, bits, 0) | (wide & SIGN)
    return bits.view(mx.float32).reshape(-1)[: codes.size]
