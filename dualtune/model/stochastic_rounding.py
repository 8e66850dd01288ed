"""Weights in bfloat16 without float32 masters: each update is rounded up or down at random, so that on average it is
the update.

A weight in bfloat16 has 8 bits of mantissa, and an update of less than half of the last one would be lost each time.
With w between its neighbours a < w < b, the result is b with probability (w - a) / (b - a), else a. What decides is a
function of (seed, step, element), as dropout's masks are: nothing to save, the same on every backend and after a
resume. An element is the number of a weight in the state, its tensors in the order of their names.

The functions here compute with arrays of numpy, torch or mlx.core: integers are int32, whose products wrap.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from dualtune.model.optimizer import OptimizerSpec, Run, Shapes, TensorShape

Array = Any  # of numpy, torch or mlx.core
MasterWeights = Literal["float32", "bfloat16"]
_KEPT = -(1 << 16)  # the bits of a float32 that a bfloat16 has


def rounded(w_N: Array, elements_N: Array, step: Array, seed: int, xp: Any) -> Array:
    """Return float32 weights after update `step` as float32 values that bfloat16 has. Those are left as they are.

    `elements` and `step` are int32; `step` has one element.
    """
    noise_N = mixed(elements_N ^ mixed(step ^ _signed(seed))) & 0xFFFF
    return ((w_N.view(xp.int32) + noise_N) & _KEPT).view(xp.float32)


def mixed(h: Array) -> Array:
    """Return the hash of each int32: MurmurHash3's finalizer."""
    from dualtune.model.dropout import MIX1, MIX2

    for shift, factor in ((16, MIX1), (13, MIX2)):
        h = (h ^ (h >> shift & (1 << 32 - shift) - 1)) * _signed(factor)  # a shift that fills up with zeros
    return h ^ (h >> 16 & 0xFFFF)


def _signed(value: int) -> int:
    """Return the int32 with the last 32 bits of a number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def first_elements(shapes: Shapes) -> dict[str, int]:
    """Return the number of the first element of each tensor, as an int32."""
    first, found = 0, dict[str, int]()
    for name in sorted(shapes):
        found[name] = _signed(first)
        first += math.prod(shapes[name])
    return found


class UpdatePart(NamedTuple):
    """Neighbours in a flat array, which an update holds in float32 at a time."""

    run: Run
    pieces: list[tuple[int, int]]  # of each tensor in it: the number of the first element, and how many there are


def update_parts(spec: OptimizerSpec, shapes: Shapes, most: int) -> list[UpdatePart]:
    """Cut a flat array of these tensors into parts of at most `most` values, or of one tensor that the optimizer's
    formula needs whole."""
    firsts, parts, size = first_elements(shapes), list[UpdatePart](), 0
    for name, shape in shapes.items():
        count, factor = math.prod(shape), spec.lr_factor(name)
        each = most if spec.entry.by_tensor is None else count
        for start in range(0, count, each):
            length = min(each, count - start)
            if not parts or size + length > most or parts[-1].run.lr_factor != factor:
                parts.append(UpdatePart(Run(factor, dict[str, TensorShape]()), []))
                size = 0
            part = parts.pop()
            own = {**part.run.shapes, name: shape if length == count else (length,)}
            parts.append(UpdatePart(Run(factor, own), [*part.pieces, (_signed(firsts[name] + start), length)]))
            size += length
    return parts
