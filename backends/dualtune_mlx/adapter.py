"""A model that is trained whole (adapter.method: full): all its parameters are views of one flat float32 array.

In float32 it computes with these masters. In 16 bits it computes with a copy of them, and the gradient of the copy is
added to a float32 gradient.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import Tensors
from dualtune.model.experts import expert_of, is_stack, members
from dualtune.model.places import FilePlace
from dualtune.model.weight_files import BaseWeights
from dualtune_mlx.adapter_inputs import Origins
from dualtune_mlx.experts import expert_places
from dualtune_mlx.host.places import find_places, stored_names
from dualtune_mlx.methods import Bound, DropoutSeeds


class _Part(NamedTuple):
    """A parameter of the model as it lies in the array that is trained."""

    transposed: bool = False  # the array has the last two axes the other way round
    rows: slice | None = None  # of its second axis, once that is turned: a projection in a stack of several

    def of(self, array: mx.array) -> mx.array:
        """Return the parameter from the array."""
        turned = array.swapaxes(-1, -2) if self.transposed else array
        return turned if self.rows is None else turned[:, self.rows]


class WholeModel(Bound):
    """The parameters of a model by the names of the base's files: what `AdaptedLayers` is for an adapter.

    What is trained has the form of the files, of which the model's parameters are views: the transposes of GPT-2's
    matrices, the halves of gpt-oss's stacks of gate and up. A stack of experts that they hold one by one is one array
    here, by the name of the stack (`dualtune.model.experts`), and theirs in a state.
    """

    def __init__(self, model: nn.Module, base: BaseWeights | None, dropout_seeds: DropoutSeeds) -> None:
        """ConfigError for a parameter that is in the files in another way: its name would say nothing."""
        self.dropout_seeds, self.start = dropout_seeds, {}
        arrays = dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
        names = {path: path for path in arrays} if base is None else stored_names(model, base)
        places = {path: (name, _Part()) for path, name in names.items()}
        if base is not None and (other := arrays.keys() - names.keys()):
            places |= _transposed(model, base, other) | _of_experts(model, base, other)
        if other := sorted(arrays.keys() - places.keys()):
            raise ConfigError(
                f"adapter.method: got full, but mlx-lm computes {len(other)} of the parameters from the model's files "
                f"instead of reading them as they are (for example {other[0]}), so nothing else could load what is "
                "trained. Train it on torch, or set adapter.method: lora"
            )
        modules = dict(model.named_modules())
        self.bound = {}
        self._owners: dict[str, list[tuple[Any, str, _Part]]] = defaultdict(list)
        for path, array in arrays.items():
            (name, part), (owner, _, attribute) = places[path], path.rpartition(".")
            self._owners[name].append((modules[owner], attribute, part))
            if part.rows is None:
                self.bound[name] = part.of(array)  # a transposition undoes itself
            else:
                assert base is not None
                self.bound.setdefault(name, mx.zeros(base.tensors[name].shape, array.dtype))
                self.bound[name] = _with(self.bound[name], part, array)

    def state(self) -> Tensors:
        """Return copies of what is bound, float32, those of experts one by one."""
        found: Tensors = {}
        for name, array in self.bound.items():
            values = np.array(array.astype(mx.float32))
            found |= dict(zip(members(name, len(values)), values, strict=True)) if is_stack(name) else {name: values}
        return dict(sorted(found.items()))

    @property
    def stacks(self) -> list[str]:
        """The names of the stacks of experts."""
        return [*filter(is_stack, self.bound)]

    def names_in(self, modules: Collection[nn.Module]) -> list[str]:
        """Return the names of the parameters of these modules, and of those inside them."""
        inside = {id(part) for module in modules for part in module.modules()}
        return [name for name, owners in self._owners.items() if any(id(owner) in inside for owner, _, _ in owners)]

    def bind(self, params: Mapping[str, mx.array]) -> None:
        """Compute with these arrays: those of all parameters, or of some."""
        self.bound |= params
        for name, array in params.items():
            for owner, attribute, part in self._owners[name]:
                owner[attribute] = part.of(array)

    def release(self) -> None:
        """Let go of the arrays until the next `bind`: what a model still reads is not changed in place, but copied."""
        nothing = mx.zeros(0)
        self.bound = dict.fromkeys(self.bound, nothing)
        for owner, attribute, _ in itertools.chain(*self._owners.values()):
            owner[attribute] = nothing

    def trace(self, origins: Origins) -> None:
        """Do nothing: there are no adapters whose inputs could be made again."""

    def forget(self) -> None:
        """Do nothing: layers keep nothing for each other."""


def _with(whole: mx.array, part: _Part, array: mx.array) -> mx.array:
    """Return a stack of the files with a parameter in its place."""
    turned = whole.swapaxes(-1, -2) if part.transposed else whole
    turned[:, part.rows] = array
    return turned.swapaxes(-1, -2) if part.transposed else turned


def _transposed(model: nn.Module, base: BaseWeights, paths: Collection[str]) -> dict[str, tuple[str, _Part]]:
    """Return the tensors of the files that these parameters are the transposes of, by path."""
    modules = [path.removesuffix(".weight") for path in paths if path.endswith(".weight")]
    return {
        f"{path}.weight": (at.tensor, _Part(transposed=True))
        for path, at in find_places(model, base, modules).items()
        if at == FilePlace(at.tensor, transposed=True)
    }


def _of_experts(model: nn.Module, base: BaseWeights, paths: Collection[str]) -> dict[str, tuple[str, _Part]]:
    """Return what these parameters of experts are in the files, by path: tensors of their own, or parts of a stack."""
    found: dict[str, tuple[str, _Part]] = {}
    for path, places in expert_places(model, base).items():
        first, tensors = places[0], [place.tensor for place in places]
        if f"{path}.weight" not in paths:
            continue
        if first.expert is not None:
            rows = None if first.rows is None else slice(*first.rows)
            found[f"{path}.weight"] = first.tensor, _Part(first.transposed, rows)
            if (bias := f"{first.tensor}_bias") in base.tensors and f"{path}.bias" in paths:
                found[f"{path}.bias"] = bias, _Part(rows=rows)
        elif (expert := expert_of(first.tensor)) and tensors == members(expert.stack, len(places)):
            found[f"{path}.weight"] = expert.stack, _Part()
    return found
