"""Optimizer state in 8-bit codes: blocks of values that share an exponent, rounded with a dither.

Blocks are those of Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861): 256 consecutive
values of a tensor, the last one shorter. The codes are not theirs, but those of a small float. The float32 values with
only the highest `mantissa_bits` bits of the mantissa form a grid, and a grid value's index is its bit pattern shifted
right. A block stores the index of its largest value (`top`, int16), and for each value its distance from there. So all
operations are integer ones on bit patterns: every device computes the same codes, and decoded values have these codes
again, to the bit, whatever the dither.

Rounding to the nearest would freeze the second moment: in a step it changes by far less than half the distance of two
codes. Here a value rounds up if its remainder and the dither reach the next grid value, so that the mean over steps is
the value (stochastic rounding: Gupta et al., arXiv 1502.02551). The dither is not random: from step to step, and
from place to place in a block, it moves by an irrational share of its range (Weyl's sequence). It depends on nothing
else, so a resumed run rounds as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

BLOCK = 256  # values that share a top
MANTISSA_BITS = 23  # of a float32
SMALLEST_EXPONENT = 64  # biased. Below 2^-63 = 1e-19 is zero, so that squares of decoded values are normal numbers
LARGEST_BITS = 0x7F7FFFFF  # of the largest finite float32
STEP_STRIDE = 648_055  # 2^20 / the golden ratio
PLACE_STRIDE = 791_547  # 2^20 / the plastic number


@dataclass(frozen=True, slots=True)
class EightBitCode:
    """How a slot is coded. The code of zero is 0, that of the largest value of a block `largest` or -`largest`."""

    largest: int
    mantissa_bits: int  # grid values for each power of two: 2^mantissa_bits
    keeps_small: bool  # whether a value below the range becomes the smallest one (else zero)

    @property
    def is_signed(self) -> bool:
        return self.largest < 128

    @property
    def shift(self) -> int:
        """Bits of a float32 between two grid values."""
        return MANTISSA_BITS - self.mantissa_bits

    @property
    def dither_mask(self) -> int:
        return (1 << self.shift) - 1

    @property
    def smallest_index(self) -> int:
        return SMALLEST_EXPONENT << self.mantissa_bits

    @property
    def largest_index(self) -> int:
        return LARGEST_BITS >> self.shift


# Both reach down to 2^-15.9 of the largest value of a block. A second moment that became 0 would make the update
# explode, and a first moment that became larger than it is would move a weight for nothing.
CODES = {"m": EightBitCode(127, 3, keeps_small=False), "root_v": EightBitCode(255, 4, keeps_small=True)}


def encode(values: np.ndarray, code: EightBitCode, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (codes int8 or uint8 [N], tops int16 [blocks]) of a tensor's float32 values [N] after update `step`."""
    import numpy as np

    blocks = np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    index = (np.abs(blocks).view(np.int32) + dither(code, step)) >> code.shift
    index = np.where(index < code.smallest_index, 0, np.minimum(index, code.largest_index))
    top = index.max(axis=1, keepdims=True)
    codes = np.maximum(index - top + code.largest, int(code.keeps_small)) * (index > 0)
    codes = np.sign(blocks).astype(np.int32) * np.maximum(codes, 0)
    return codes.astype(np.int8 if code.is_signed else np.uint8).ravel()[: values.size], top.astype(np.int16).ravel()


def decode(codes: np.ndarray, tops: np.ndarray, code: EightBitCode) -> np.ndarray:
    """Return the float32 values [N] of codes [N] and tops [blocks]."""
    import numpy as np

    distance = np.repeat(tops, BLOCK)[: codes.size].astype(np.int32) - code.largest
    magnitude = np.abs(codes.astype(np.int32))
    bits = np.where(magnitude > 0, (magnitude + distance) << code.shift, 0).astype(np.int32)
    return np.sign(codes).astype(np.float32) * bits.view(np.float32)


def dither(code: EightBitCode, step: int) -> np.ndarray:
    """Return int32 [BLOCK], from 0 to just below 2^shift: what is added to the bits of a value before they are cut."""
    import numpy as np

    place = np.arange(BLOCK, dtype=np.int64) * PLACE_STRIDE
    return ((place + step * STEP_STRIDE) & code.dither_mask).astype(np.int32)


def chunks_of(sizes: Iterable[int], chunk: int) -> Iterator[tuple[slice, slice]]:
    """Yield (values, blocks) of each chunk of a flat array of tensors. `chunk` is a multiple of BLOCK.

    A tensor whose size is not a multiple of BLOCK ends a chunk, so that no block has values of two tensors.
    """
    start = end = block = 0
    for size in (*sizes, 0):
        end += size
        while start < end and (end - start >= chunk or (end - start) % BLOCK or not size):
            stop = min(end, start + chunk)
            num_blocks = -(-(stop - start) // BLOCK)
            yield slice(start, stop), slice(block, block + num_blocks)
            start, block = stop, block + num_blocks


def rounded(values: np.ndarray, code: EightBitCode, step: int) -> np.ndarray:
    """Return the values of a tensor as they are decoded, in its shape and in float32."""
    import numpy as np

    codes, tops = encode(np.ascontiguousarray(values, np.float32).ravel(), code, step)
    return decode(codes, tops, code).reshape(values.shape)
