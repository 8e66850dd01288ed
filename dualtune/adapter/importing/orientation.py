"""The orientation of each module's two matrices, decided only by their shapes.

For square layers a missed transpose (Bᵀ Aᵀ would be right) and an exchange (A B would be) have the same shapes: then
there are several answers, and the caller needs more information.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dualtune.adapter.formats.canonical import Pair, Pairs
from dualtune.adapter.layers import place_of

Shapes = Mapping[str, tuple[int, int] | None]  # module -> (out, in), None if unknown
Turn = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

AS_NAMED = "as named"
TURNS: dict[str, Turn] = {  # how lora_A and lora_B were changed -> how to undo it
    AS_NAMED: lambda a, b: (a, b),
    "lora_A and lora_B are transposed": lambda a, b: (a.T, b.T),
    "lora_A is transposed": lambda a, b: (a.T, b),
    "lora_B is transposed": lambda a, b: (a, b.T),
    "lora_A and lora_B are exchanged": lambda a, b: (b, a),
    "lora_A and lora_B are exchanged and transposed": lambda a, b: (b.T, a.T),
}
SCRAMBLED = "lora_A and lora_B were transposed in name and shape, but not in memory"
# Modules that read and write the hidden states of a transformer block, by the last part of the path.
_READS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_WRITES = {"o_proj", "down_proj"}


class Reading(NamedTuple):
    """One way to read all matrices of a file; `turns` has the modules that are not read as they are named."""

    turns: dict[str, str]
    pairs: Pairs


def readings(pairs: Pairs, ranks: Mapping[str, int | None], base: Shapes) -> list[Reading]:
    """Return the ways to read the file that fit the ranks, the base model's shapes and each other; [] if none does.

    Names are trusted if they fit. Otherwise all modules are assumed to have the same damage. Only if that does not fit,
    each module is decided separately, by its shape in the base model or in the other layers.
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
    if all(own.values()):  # several ways for some modules: two are enough to show that there is no single one
        return [_turned(pairs, {m: turns[i % len(turns)] for m, turns in own.items()}) for i in range(2)]
    return []


def unscrambled(pairs: Pairs) -> Reading:
    """Undo a transposed view that was written in memory order: right shapes, but numbers in wrong places."""
    straight = {m: Pair(p.A_rI.T.reshape(p.A_rI.shape), p.B_Or.T.reshape(p.B_Or.shape)) for m, p in pairs.items()}
    return Reading(dict.fromkeys(pairs, SCRAMBLED), straight)


def common_rank(pairs: Pairs) -> int | None:
    """Return the rank that all pairs have in some low-rank reading; None if there is none."""
    turned = [[Pair(*turn(*pair)) for turn in TURNS.values()] for pair in pairs.values()]
    possible = [{pair.A_rI.shape[0] for pair in ways if _fits(pair, None, None)} for ways in turned]
    ranks = set[int].intersection(*possible) if possible else set[int]()
    return ranks.pop() if len(ranks) == 1 else None


def _fits(pair: Pair, rank: int | None, shape: tuple[int, int] | None, turn: str = "") -> bool:
    """Return whether B A exists, with this rank and shape.

    A rank above the layer's size is accepted only without a turn; else a wrong rank would turn a small layer's
    matrices.
    """
    inner = pair.A_rI.shape[0]
    if inner != pair.B_Or.shape[1] or shape not in (None, pair.delta_shape) or rank not in (None, inner):
        return False
    return inner <= min(pair.delta_shape) or (turn == AS_NAMED and rank is not None)


def _turned(pairs: Pairs, turns: Mapping[str, str]) -> Reading:
    turned = {module: Pair(*TURNS[turns[module]](*pair)) for module, pair in pairs.items()}
    return Reading({module: turn for module, turn in turns.items() if turn != AS_NAMED}, turned)


def _is_one_stack(pairs: Pairs) -> bool:
    """Return whether a module has the same shape in all layers, and the hidden states have one width."""
    shapes, hidden, inner = defaultdict[str, set[tuple[int, int]]](set), set[int](), set[int]()
    for module, pair in pairs.items():
        place, last = place_of(module), module.rpartition(".")[2]
        shapes[place.name if place else module].add(pair.delta_shape)
        out_dim, in_dim = pair.delta_shape
        hidden |= {in_dim} if last in _READS else {out_dim} if last in _WRITES else set()
        inner |= {out_dim} if last in ("gate_proj", "up_proj") else {in_dim} if last == "down_proj" else set()
    return len(hidden) <= 1 and len(inner) <= 1 and all(len(found) == 1 for found in shapes.values())


def _shapes_of_others(trusted: Pairs, pairs: Pairs) -> dict[str, tuple[int, int] | None]:
    """Return the shape of the same module in other layers, if those agree."""
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
