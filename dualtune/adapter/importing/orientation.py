"""The orientation of each module's two matrices, decided only by their shapes.

For square layers a missed transpose (Bᵀ Aᵀ would be right) and a swap (A B would be) have the same shapes: then
there are several answers, and the caller needs more information.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dualtune.adapter.formats.canonical import Pair, Pairs
from dualtune.adapter.layers import position_of

Shapes = Mapping[str, tuple[int, int] | None]  # module -> (out, in), None if unknown
Undo = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

AS_NAMED = "as named"
CHANGES: dict[str, Undo] = {  # how lora_A and lora_B were changed -> how to undo it
    AS_NAMED: lambda a, b: (a, b),
    "lora_A and lora_B are transposed": lambda a, b: (a.T, b.T),
    "lora_A is transposed": lambda a, b: (a.T, b),
    "lora_B is transposed": lambda a, b: (a, b.T),
    "lora_A and lora_B are swapped": lambda a, b: (b, a),
    "lora_A and lora_B are swapped and transposed": lambda a, b: (b.T, a.T),
}
SCRAMBLED = "lora_A and lora_B are transposed in the header only, not in the data"
# Modules that read and write the hidden states of a transformer block, by the last part of the path.
_READS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_WRITES = {"o_proj", "down_proj"}


class Reading(NamedTuple):
    """One way to read all matrices of a file; `changes` has the modules that are not read as they are named."""

    changes: dict[str, str]
    pairs: Pairs


def readings(pairs: Pairs, ranks: Mapping[str, int | None], base: Shapes) -> list[Reading]:
    """Return the ways to read the file that fit the ranks, the base model's shapes and each other; [] if none does.

    Names are trusted if they fit. Otherwise all modules are assumed to have the same damage. Only if that does not fit,
    each module is decided separately, by its shape in the base model or in the other layers.
    """

    def fitting(module: str, expected: Shapes) -> list[str]:
        undone = {name: Pair(*undo(*pairs[module])) for name, undo in CHANGES.items()}
        return [name for name, pair in undone.items() if _fits(pair, ranks[module], expected.get(module), name)]

    found = {module: fitting(module, base) for module in pairs}
    common = [change for change in CHANGES if all(change in changes for changes in found.values())]
    if AS_NAMED in common:
        return [Reading({}, pairs)]
    alike = [_undo(pairs, dict.fromkeys(pairs, change)) for change in common]
    if not base:
        alike = [reading for reading in alike if _is_one_stack(reading.pairs)]
    if alike:
        return alike
    shapes = dict(base) or _shapes_of_others({m: pairs[m] for m, each in found.items() if AS_NAMED in each}, pairs)
    own = {module: fitting(module, shapes) for module in pairs}
    own = {module: changes[:1] if AS_NAMED in changes else changes for module, changes in own.items()}
    if all(len(changes) == 1 for changes in own.values()):
        return [_undo(pairs, {module: changes[0] for module, changes in own.items()})]
    if all(own.values()):  # several ways for some modules: two are enough to show that there is no single one
        return [_undo(pairs, {m: changes[i % len(changes)] for m, changes in own.items()}) for i in range(2)]
    return []


def unscrambled(pairs: Pairs) -> Reading:
    """Undo a transposed view that was written in memory order: right shapes, but numbers in the wrong order."""
    straight = {m: Pair(p.A_rI.T.reshape(p.A_rI.shape), p.B_Or.T.reshape(p.B_Or.shape)) for m, p in pairs.items()}
    return Reading(dict.fromkeys(pairs, SCRAMBLED), straight)


def common_rank(pairs: Pairs) -> int | None:
    """Return the rank that all pairs have in some low-rank reading; None if there is none."""
    candidates = [[Pair(*undo(*pair)) for undo in CHANGES.values()] for pair in pairs.values()]
    possible = [{pair.A_rI.shape[0] for pair in each if _fits(pair, None, None)} for each in candidates]
    ranks = set[int].intersection(*possible) if possible else set[int]()
    return ranks.pop() if len(ranks) == 1 else None


def _fits(pair: Pair, rank: int | None, shape: tuple[int, int] | None, change: str = "") -> bool:
    """Return whether B A exists, with this rank and shape.

    A rank above the layer's size is accepted only for matrices as named; else a wrong rank would transpose those
    of a small layer.
    """
    inner = pair.A_rI.shape[0]
    if inner != pair.B_Or.shape[1] or shape not in (None, pair.delta_shape) or rank not in (None, inner):
        return False
    return inner <= min(pair.delta_shape) or (change == AS_NAMED and rank is not None)


def _undo(pairs: Pairs, changes: Mapping[str, str]) -> Reading:
    undone = {module: Pair(*CHANGES[changes[module]](*pair)) for module, pair in pairs.items()}
    return Reading({module: change for module, change in changes.items() if change != AS_NAMED}, undone)


def _is_one_stack(pairs: Pairs) -> bool:
    """Return whether a module has the same shape in all layers, and the hidden states have one width."""
    shapes, hidden, inner = defaultdict[str, set[tuple[int, int]]](set), set[int](), set[int]()
    for module, pair in pairs.items():
        position, last = position_of(module), module.rpartition(".")[2]
        shapes[position.name if position else module].add(pair.delta_shape)
        out_dim, in_dim = pair.delta_shape
        hidden |= {in_dim} if last in _READS else {out_dim} if last in _WRITES else set()
        inner |= {out_dim} if last in ("gate_proj", "up_proj") else {in_dim} if last == "down_proj" else set()
    return len(hidden) <= 1 and len(inner) <= 1 and all(len(found) == 1 for found in shapes.values())


def _shapes_of_others(trusted: Pairs, pairs: Pairs) -> dict[str, tuple[int, int] | None]:
    """Return the shape of the same module in other layers, if those agree."""
    found = defaultdict[str, set[tuple[int, int]]](set)
    for module, pair in trusted.items():
        if position := position_of(module):
            found[position.name].add(pair.delta_shape)
    positions = {module: position_of(module) for module in pairs}
    return {
        module: next(iter(found[position.name]))
        for module, position in positions.items()
        if position and len(found.get(position.name, ())) == 1
    }
