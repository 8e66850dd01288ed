"""Adapters of experts <-> PEFT's adapters of fused parameters, and mlx-lm's of stacks.

Canonical are linear layers of single experts (`dualtune.model.experts`). PEFT 0.21 adapts the parameters of
transformers 5 (`ParamWrapper` in peft/tuners/lora/layer.py), for E experts, rank r and O outputs, as

    <experts>.lora_A.weight [E · r, in]: expert by expert, and <experts>.lora_B.weight [O, r · E]: rank by rank,

of `down_proj`; those of `gate_up_proj` are inside, under <experts>.base_layer. Gate and up share that parameter, so
that two adapters of rank r become one of rank 2r, whose B is block-diagonal; one with an A for both becomes two with
copies of it. Both ways are exact. Llama 4 stores matrices as [in, out], which PEFT does not know: its A and B are each
other's transposes there. mlx-lm (`LoRASwitchLinear` in tuner/lora.py) has `lora_a` [E, r, in] and `lora_b`
[E, O, r] for each projection, which are ours, stacked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from dualtune.base.errors import FormatError
from dualtune.model.adapter import Tensors, modules_of, parse_name, tensor_name, within_stack
from dualtune.model.experts import DOWN, GATE, ROLES, UP, Expert, expert_of, members, stacks_of
from dualtune.model.formats.canonical import Pair, Pairs, fold, pad
from dualtune.model.formats.naming import ExpertNames
from dualtune.model.targets import is_target

INNER = ".base_layer"
FUSED, UNGATED = "gate_up_proj", "up_proj"  # transformers' parameters; the other one is DOWN
_SWITCH = re.compile(r"(?P<before>.+)\.(switch_mlp|switch_glu|experts)\.(?P<name>gate_proj|up_proj|down_proj|fc1|fc2)")
_FC = {"fc1": UP, "fc2": DOWN}  # mlx-lm's names in experts without a gate


class Parameters(NamedTuple):
    """An adapter in PEFT's names, and what its config says of the adapted parameters of experts."""

    linear: Tensors  # of linear layers
    tensors: Tensors  # of parameters
    forms: dict[str, tuple[int, float]]  # the rank and the scale of each parameter, by its path in transformers


def to_parameters(tensors: Tensors, names: ExpertNames, scale_of: Callable[[str], float]) -> Parameters:
    """Return canonical tensors with those of experts as PEFT's of parameters.

    `scale_of`: the factor of B A in a module. Where experts, or gate and up, that share a parameter have several, B
    is multiplied. A layer of single experts stays a linear layer: PEFT adapts all experts that share a parameter.
    """
    others, found, forms = dict(tensors), Tensors(), dict[str, tuple[int, float]]()
    for container, by_role in _containers(tensors, whole=True).items():
        scales = {DOWN if role == DOWN else FUSED: scale_of(modules[0]) for role, modules in by_role.items()}
        stacks = {
            role: _stacked(tensors, modules, lambda m, s=scales[DOWN if role == DOWN else FUSED]: scale_of(m) / s)
            for role, modules in by_role.items()
        }
        within = {role: stacks[role] for role in (GATE, UP) if role in stacks}
        fused: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if within:
            fused[FUSED if names.gate else UNGATED] = _fused(within, names) if names.gate else within[UP]
        if DOWN in stacks:
            fused[DOWN] = stacks[DOWN]
        if names.turned:
            fused = {parameter: _turned(*stack) for parameter, stack in fused.items()}
        for module in (module for modules in by_role.values() for module in modules):
            for part in "AB":
                del others[tensor_name(module, part)]
        for parameter, (A_ErI, B_EOr) in fused.items():
            layer = names.in_peft(container) + (INNER if parameter != DOWN and DOWN in fused else "")
            rank = A_ErI.shape[1]
            found[tensor_name(layer, "A")] = np.ascontiguousarray(A_ErI.reshape(-1, A_ErI.shape[2]))
            found[tensor_name(layer, "B")] = np.ascontiguousarray(B_EOr.transpose(1, 2, 0).reshape(B_EOr.shape[1], -1))
            scale = scales[DOWN if parameter == DOWN else FUSED]
            forms[within_stack(f"{names.in_transformers(container)}.{parameter}")] = rank, scale
    return Parameters(others, found, forms)


def _containers(tensors: Iterable[str], *, whole: bool = False) -> dict[str, dict[str, list[str]]]:
    """Return the modules of each projection of experts, by the path of the mixture and the projection's role.

    FormatError for one of which some experts are not adapted; with `whole`, it is left out.
    """
    containers: dict[str, dict[str, list[str]]] = defaultdict(dict)
    stacks = stacks_of(modules_of(tensors))
    count = max(map(len, stacks.values()), default=0)
    for stack, modules in stacks.items():
        expert = expert_of(stack)
        assert expert is not None
        role, is_whole = ROLES.get(expert.name), modules == members(stack, count) and count > 1
        if whole and not (role and is_whole):
            continue
        if role is None or not is_whole:
            problem = "some experts are not" if role else f"a projection called {expert.name} is not among {[*ROLES]}"
            raise FormatError(
                f"adapter: {modules[0]}: mlx-lm stacks the experts of a layer in one tensor for each projection, but "
                f"here {problem} adapted. Write it with the layout peft."
            )
        containers[expert.container][role] = modules
    return containers


def _stacked(
    tensors: Tensors, modules: Iterable[str], factor_of: Callable[[str], float] = lambda module: 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return A [E, r, in] and B [E, out, r], padded to the largest rank, with each B multiplied by a factor."""
    pairs = {m: Pair(tensors[tensor_name(m, "A")], tensors[tensor_name(m, "B")]) for m in modules}
    rank = max(len(pair.A_rI) for pair in pairs.values())
    As = [pad(pair.A_rI, rank, axis=0) for pair in pairs.values()]
    Bs = [fold(pad(pair.B_Or, rank, axis=1), factor_of(m)) for m, pair in pairs.items()]
    return np.stack(As), np.stack(Bs)


def _fused(within: Mapping[str, tuple[np.ndarray, np.ndarray]], names: ExpertNames) -> tuple[np.ndarray, np.ndarray]:
    """Return the adapter of the parameter that holds gate and up, of as many ranks as both have together."""
    A_ERI = np.concatenate([A for A, _ in within.values()], axis=1)
    count, out, _ = next(iter(within.values()))[1].shape
    B_E2OR, begin = np.zeros((count, 2 * out, A_ERI.shape[1]), np.float32), 0
    for role, (_, B_EOr) in within.items():
        rank = B_EOr.shape[2]
        B_E2OR[:, _rows(role, out, names), begin : begin + rank] = B_EOr
        begin += rank
    idle = ((0, names.idle), (0, 0), (0, 0))
    return np.pad(A_ERI, idle, "edge"), np.pad(B_E2OR, idle)  # zeros alone would be taken for an interrupted write


def _turned(A_ErI: np.ndarray, B_EOr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the adapter of the transposed matrices."""
    return B_EOr.transpose(0, 2, 1), A_ErI.transpose(0, 2, 1)


def _rows(role: str, out: int, names: ExpertNames) -> slice:
    """Return the rows of the shared parameter that are those of gate or up."""
    second = int(role == UP)
    return slice(second, None, 2) if names.interleaved else slice(second * out, (second + 1) * out)


def is_parameter(name: str) -> bool:
    """Return whether an entry of target_parameters is a stack of experts."""
    container, _, parameter = name.rpartition(".")
    return container.rpartition(".")[2].endswith("experts") and parameter in (FUSED, UNGATED, DOWN)


def is_mixture(module: str) -> bool:
    """Return whether PEFT's tensors of this module are those of parameters of experts, and no linear layer's."""
    return module.removesuffix(INNER).rpartition(".")[2].endswith("experts")


def from_parameters(
    pairs: Pairs,
    names: ExpertNames,
    parameters: Collection[str],
    rank_of: Callable[[str], int],
    where: object,
) -> tuple[Pairs, dict[str, str]]:
    """Return PEFT's pairs with those of parameters of experts apart: (pairs, module -> the parameter it was of).

    `parameters` are the config's target_parameters; `rank_of` tells of the path of one, as transformers calls it, what
    the config says.
    """
    apart, sources = dict(pairs), dict[str, str]()
    for module in pairs:
        if not is_mixture(module):
            continue
        container = module.removesuffix(INNER)
        mixture = names.in_transformers(names.in_files(container))
        first = [name for name in (FUSED, UNGATED) if is_target(f"{mixture}.{name}", parameters)]
        has_down = container in pairs and (container + INNER in pairs or not first)
        parameter = first[0] if first and (module != container or not has_down) else DOWN
        path = f"{mixture}.{parameter}"
        if not is_target(path, parameters):
            raise FormatError(f"{where}: {module}: target_parameters does not name {path}, which its tensors are of")
        for role, (A_ErI, B_EOr) in _split(apart.pop(module), parameter, rank_of(path), names, where).items():
            stack = Expert(names.in_files(container), "*", names.of(role)).stack
            for name, A_rI, B_Or in zip(members(stack, len(A_ErI)), A_ErI, B_EOr, strict=True):
                apart[name], sources[name] = Pair(A_rI, B_Or), path
    return apart, sources


def _split(
    pair: Pair, parameter: str, rank: int, names: ExpertNames, where: object
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A [E, r, in] and B [E, out, r] of each projection that a parameter holds."""
    (rows, width), (height, columns) = pair.A_rI.shape, pair.B_Or.shape
    out = width if names.turned else height
    if rows % rank or rows != columns or (parameter == FUSED and (out % 2 or rows <= rank * names.idle)):
        raise FormatError(
            f"{where}: {parameter} of experts: lora_A {[rows, width]} and lora_B {[height, columns]}, must be "
            f"[experts · {rank}, in] and [out, {rank} · experts]"
        )
    stack = pair.A_rI.reshape(-1, rank, width), pair.B_Or.reshape(height, rank, -1).transpose(2, 0, 1)
    A_ERI, B_EOR = _turned(*stack) if names.turned else stack
    if parameter != FUSED:
        return {DOWN if parameter == DOWN else UP: (A_ERI, B_EOR)}
    return _apart(A_ERI[: len(A_ERI) - names.idle], B_EOR[: len(B_EOR) - names.idle], names)


def _apart(A_ERI: np.ndarray, B_EOR: np.ndarray, names: ExpertNames) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the adapters of gate and up, from that of the parameter that holds both."""
    out, rank = B_EOR.shape[1:]
    halves = {role: B_EOR[:, _rows(role, out // 2, names)] for role in (GATE, UP)}
    # Two adapters that were joined come apart again: each has the columns that are zero in the other one.
    half = rank // 2
    if rank % 2 == 0 and not halves[GATE][..., half:].any() and not halves[UP][..., :half].any():
        return {GATE: (A_ERI[:, :half], halves[GATE][..., :half]), UP: (A_ERI[:, half:], halves[UP][..., half:])}
    return {role: (A_ERI, B_EOr) for role, B_EOr in halves.items() if B_EOr.any() or not halves[UP].any()}


def taking_turns(tensors: Tensors, names: ExpertNames) -> Tensors:
    """Return an adapter of whose gate and up the rows were taken for halves, where they take turns.

    PEFT's files do not say which it is. Gate and up that were of one parameter have the same A.
    """
    fixed = dict(tensors)
    for container, by_role in _containers(tensors, whole=True).items():
        for gate, up in zip(by_role.get(GATE, ()), by_role.get(UP, ()), strict=True):
            a, b = tensor_name(gate, "B"), tensor_name(up, "B")
            if not np.array_equal(tensors[tensor_name(gate, "A")], tensors[tensor_name(up, "A")]):
                raise FormatError(
                    f"adapter: {container}: gate and up take turns in this family, and have one A in PEFT"
                )
            both = np.concatenate([tensors[a], tensors[b]])
            fixed[a], fixed[b] = (np.ascontiguousarray(both[_rows(role, len(both) // 2, names)]) for role in (GATE, UP))
    return fixed


def in_form_of(tensors: Tensors, names: ExpertNames) -> Tensors:
    """Return an adapter that was read from PEFT's files without the names of its base, which they do not say."""
    if names.interleaved:
        return taking_turns(tensors, names)
    if names.idle:
        return _without_idle(tensors, names.idle)
    return _turned_back(tensors) if names.turned else tensors


def _without_idle(tensors: Tensors, idle: int) -> Tensors:
    """Return an adapter without the gate and up of other layers than experts."""
    rest = dict(tensors)
    for stack, modules in stacks_of(modules_of(tensors)).items():
        expert = expert_of(stack)
        if expert is not None and ROLES.get(expert.name) in (GATE, UP):
            for name in (tensor_name(module, part) for module in modules[-idle:] for part in "AB"):
                del rest[name]
    return rest


def _turned_back(tensors: Tensors) -> Tensors:
    """Return an adapter of whose matrices [in, out] were taken for [out, in]."""
    fixed = dict(tensors)
    for container, by_role in _containers(tensors, whole=True).items():
        for down in by_role.get(DOWN, ()):
            a, b = tensor_name(down, "A"), tensor_name(down, "B")
            fixed[a], fixed[b] = (np.ascontiguousarray(tensors[name].T) for name in (b, a))
        for gate, up in zip(by_role.get(GATE, ()), by_role.get(UP, ()), strict=True):
            A_rI, B_Or = (tensors[tensor_name(gate, part)] for part in "AB")
            if not np.array_equal(A_rI, tensors[tensor_name(up, "A")]):
                raise FormatError(f"adapter: {container}: gate and up are one parameter, and have one A in PEFT")
            both_Ir = np.concatenate([B_Or, tensors[tensor_name(up, "B")]])
            for module, rows_Or in zip((gate, up), np.split(A_rI.T, 2), strict=True):
                fixed[tensor_name(module, "A")] = np.ascontiguousarray(both_Ir.T)
                fixed[tensor_name(module, "B")] = np.ascontiguousarray(rows_Or)
    return fixed


# --- mlx-lm ----------------------------------------------------------------------------------------------------------


def to_switches(tensors: Tensors, names: ExpertNames) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A [E, r, in] and B [E, out, r] of the projections of all experts, by the paths of mlx-lm's modules."""
    return {
        switch_path(container, role, names): _stacked(tensors, modules)
        for container, by_role in _containers(tensors).items()
        for role, modules in by_role.items()
    }


def switch_path(container: str, role: str, names: ExpertNames) -> str:
    """Return the path of mlx-lm's module of a projection of all experts."""
    last = role if names.gate else next(name for name, its in _FC.items() if its == role)
    return f"{container.removesuffix('experts')}{names.mlx}.{last}"


def in_switch(module: str, names: ExpertNames) -> str:
    """Return the path of mlx-lm's module with a layer: that of a stack for a layer of an expert."""
    expert = expert_of(module)
    return module if expert is None else switch_path(expert.container, ROLES.get(expert.name, expert.name), names)


def from_switch(module: str, A_ErI: np.ndarray, B_EOr: np.ndarray, names: ExpertNames, where: object) -> Pairs:
    """Return the pairs of the experts of one of mlx-lm's modules. FormatError if it is not a stack of experts."""
    match = _SWITCH.fullmatch(module)
    if match is None or A_ErI.ndim != 3 or B_EOr.ndim != 3 or len(A_ErI) != len(B_EOr):
        raise FormatError(
            f"{where}: {module}: got shapes {A_ErI.shape} and {B_EOr.shape}, must be matrices, or [experts, rank, in] "
            "and [experts, out, rank] of a projection of experts"
        )
    name = names.of(_FC.get(match["name"], match["name"]))
    stack = Expert(f"{match['before']}.experts", "*", name).stack
    return {m: Pair(A, B) for m, A, B in zip(members(stack, len(A_ErI)), A_ErI, B_EOr, strict=True)}


def experts_among(tensors: Collection[str]) -> bool:
    """Return whether layers of experts are adapted."""
    return any((parsed := parse_name(name)) and expert_of(parsed[0]) for name in tensors)
