"""Which way round the two matrices of each module lie, decided by their shapes alone.

For square layers a missed transpose (Bᵀ Aᵀ would be right) and an exchange (A B would be) have the same shapes: then
there is more than one answer here, and the caller has to know more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dualtune.adapter.formats.canonical import Pair, Pairs
from dualtune.adapter.layers import place_of

Shapes = Mapping[str, tuple[int, int] | None]  # module -> (out, in), None where it is not known
Turn = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

AS_NAMED = "as named"
TURNS: dict[str, Turn] = {  # what was done to lora_A and lora_B -> what undoes it
    AS_NAMED: lambda a, b: (a, b),
    "lora_A and lora_B are transposed": lambda a, b: (a.T, b.T),
    "lora_A is transposed": lambda a, b: (a.T, b),
    "lora_B is transposed": lambda a, b: (a, b.T),
    "lora_A and lora_B are exchanged": lambda a, b: (b, a),
    "lora_A and lora_B are exchanged and transposed": lambda a, b: (b.T, a.T),
}
SCRAMBLED = "lora_A and lora_B were transposed in name and shape, but not in memory"
# What reads and what writes the stream of hidden states in a transformer block, by the last part of the path.
_READS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_WRITES = {"o_proj", "down_proj"}


class Reading(NamedTuple):
    """One way to read all matrices of a file; `turns` says for which modules it is not the way they are named."""

    turns: dict[str, str]
    pairs: Pairs


def readings(pairs: Pairs, ranks: Mapping[str, int | None], base: Shapes) -> list[Reading]:
    """The ways to read the file that fit the ranks, the base model's shapes and each other; [] if none does.

    The names are right where they can be. Then all modules are taken to have suffered the same; only where that fits
    nothing, each for itself, by the shape that the module has in the base model or in the other layers.
    """

    def fitting(module: str, expected: Shapes) -> list[str]:
        turned = {name: Pair(*turn(*pairs[module])) for name, turn in TURNS.items()}
        return [name for name, pair in turned.items() if _fits(pair, ranks[module], expected.get(module), name)]

    found = {module: fitting(module, base) for module in pairs}
    common = [turn for turn in TURNS if all(turn in turns for turns in found.values())]
    if AS_NAMED in common:
        return [Reading({}, pairs)]
    alike = [_turned(pairs, dict.fromkeys(pairs, turn)) for turn in common]
    if not base:
        alike = [reading for reading in alike if _is_one_stack(reading.pairs)]
    if alike:
        return alike
    shapes = dict(base) or _shapes_of_others({m: pairs[m] for m, turns in found.items() if AS_NAMED in turns}, pairs)
    own = {module: fitting(module, shapes) for module in pairs}
    own = {module: turns[:1] if AS_NAMED in turns else turns for module, turns in own.items()}
    if all(len(turns) == 1 for turns in own.values()):
        return [_turned(pairs, {module: turns[0] for module, turns in own.items()})]
    if all(own.values()):  # several ways for some: which of them does not matter, there is no single one
        return [_turned(pairs, {m: turns[i % len(turns)] for m, turns in own.items()}) for i in range(2)]
    return []


def unscrambled(pairs: Pairs) -> Reading:
    """A transposed view, written as it lay in memory: the shapes are right, the numbers are not in their places."""
    straight = {m: Pair(p.A_rI.T.reshape(p.A_rI.shape), p.B_Or.T.reshape(p.B_Or.shape)) for m, p in pairs.items()}
    return Reading(dict.fromkeys(pairs, SCRAMBLED), straight)


def common_rank(pairs: Pairs) -> int | None:
    """The one rank that all pairs have when read in some way as a product of low rank; None if there is no such."""
    turned = [[Pair(*turn(*pair)) for turn in TURNS.values()] for pair in pairs.values()]
    possible = [{pair.A_rI.shape[0] for pair in ways if _fits(pair, None, None)} for ways in turned]
    ranks = set[int].intersection(*possible) if possible else set[int]()
    return ranks.pop() if len(ranks) == 1 else None


def _fits(pair: Pair, rank: int | None, shape: tuple[int, int] | None, turn: str = "") -> bool:
    """Whether B A exists, with this rank and shape. Only under its own name is a rank above the layer's size believed.

    Else a wrong rank would turn the matrices of a small layer.
    """
    inner = pair.A_rI.shape[0]
    if inner != pair.B_Or.shape[1] or shape not in (None, pair.delta_shape) or rank not in (None, inner):
        return False
    return inner <= min(pair.delta_shape) or (turn == AS_NAMED and rank is not None)


def _turned(pairs: Pairs, turns: Mapping[str, str]) -> Reading:
    turned = {module: Pair(*TURNS[turns[module]](*pair)) for module, pair in pairs.items()}
    return Reading({module: turn for module, turn in turns.items() if turn != AS_NAMED}, turned)


def _is_one_stack(pairs: Pairs) -> bool:
    """Whether a module has the same shape in all layers, and what reads or writes the hidden states the same width."""
    shapes, hidden, inner = defaultdict[str, set[tuple[int, int]]](set), set[int](), set[int]()
    for module, pair in pairs.items():
        place, last = place_of(module), module.rpartition(".")[2]
        shapes[place.name if place else module].add(pair.delta_shape)
        out_dim, in_dim = pair.delta_shape
        hidden |= {in_dim} if last in _READS else {out_dim} if last in _WRITES else set()
        inner |= {out_dim} if last in ("gate_proj", "up_proj") else {in_dim} if last == "down_proj" else set()
    return len(hidden) <= 1 and len(inner) <= 1 and all(len(found) == 1 for found in shapes.values())


def _shapes_of_others(trusted: Pairs, pairs: Pairs) -> dict[str, tuple[int, int] | None]:
    """The shape of each module's namesakes in other layers, as far as those agree."""
    found = defaultdict[str, set[tuple[int, int]]](set)
    for module, pair in trusted.items():
        if place := place_of(module):
            found[place.name].add(pair.delta_shape)
    places = {module: place_of(module) for module in pairs}
    return {
        module: next(iter(found[place.name]))
        for module, place in places.items()
        if place and len(found.get(place.name, ())) == 1
    }
