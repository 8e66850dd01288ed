"""A model that is trained whole (adapter.method: full): all its parameters are made of one flat float32 array.

In float32 it computes with these masters. In 16 bits it computes with a copy of them, and the gradient of the copy is
added to a float32 gradient.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import Tensors
from dualtune.model.beside import is_constant
from dualtune.model.experts import expert_of, is_stack, members
from dualtune.model.weight_files import BaseWeights
from dualtune_mlx.adapter_inputs import Origins
from dualtune_mlx.experts import expert_places
from dualtune_mlx.host.places import MadeParameters, read_tensor, stored_names
from dualtune_mlx.methods import Bound, DropoutSeeds

Owner = tuple[Any, str]  # the module that has a parameter, and its attribute


class WholeModel(Bound):
    """The parameters of a model by the names of the base's files: what `AdaptedLayers` is for an adapter.

    What is trained has the form of the files. A parameter that mlx-lm makes of their tensors (the transposes of GPT-2's
    matrices, the halves of gpt-oss's stacks of gate and up, norms that it adds 1 to) is made of what is trained in the
    same way. A stack of experts that they hold one by one is one array here, by the name of the stack
    (`dualtune.model.experts`), and theirs in a state. Constants keep their numbers: what is in no file, and what no
    gradient trains (`is_constant`).
    """

    def __init__(
        self, model: nn.Module, base: BaseWeights | None, dropout_seeds: DropoutSeeds, dtype: mx.Dtype
    ) -> None:
        """`dtype`: of what is not trained. ConfigError for a parameter that is made of the files in a way that is not
        understood: its name would say nothing."""
        self.dropout_seeds, self.start, self.bound = dropout_seeds, {}, {}
        parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        arrays = {path: array for path, array in parameters if mx.issubdtype(array.dtype, mx.floating)}
        names = {path: path for path in arrays} if base is None else stored_names(model, base)
        if base is not None and (other := arrays.keys() - names.keys()):
            names |= _stacks(model, base, other)
        modules = dict(model.named_modules())
        places = {path: (modules[path.rpartition(".")[0]], path.rpartition(".")[2]) for path in arrays}
        self._owners: dict[str, list[Owner]] = defaultdict(list)
        trained = {path for path in arrays if path in names and not is_constant(names[path])}
        for path in (path for path in arrays if path in trained):
            self._owners[names[path]].append(places[path])
            self.bound[names[path]] = arrays[path]
        self._derived: MadeParameters | None = None
        self._made_owners: dict[str, Owner] = {}
        if base is not None and (other := arrays.keys() - names.keys()):
            self._derived = _derived_parameters(model, base, other)
            self.bound |= {name: read_tensor(base.tensors[name]) for name in self._derived.tensors - self.bound.keys()}
            _check(self._derived.of(self.bound, self._derived.tensors), arrays)
            self._made_owners = {path: places[path] for path, sources in self._derived.sources.items() if sources}
        for path in arrays.keys() - trained - self._made_owners.keys():
            owner, attribute = places[path]
            owner[attribute] = arrays[path].astype(dtype)

    def state(self) -> Tensors:
        """Return copies of what is bound, float32, those of experts one by one."""
        tensors: Tensors = {}
        for name, array in self.bound.items():
            values = np.array(array.astype(mx.float32))
            tensors |= dict(zip(members(name, len(values)), values, strict=True)) if is_stack(name) else {name: values}
        return dict(sorted(tensors.items()))

    @property
    def stacks(self) -> list[str]:
        """The names of the stacks of experts."""
        return [*filter(is_stack, self.bound)]

    def names_in(self, modules: Collection[nn.Module]) -> list[str]:
        """Return the names of what the parameters of these modules, and of those inside them, are made of."""
        inside = {id(part) for module in modules for part in module.modules()}
        names = [name for name, owners in self._owners.items() if any(id(owner) in inside for owner, _ in owners)]
        of_made = {} if self._derived is None else self._derived.sources
        sources = (of_made[path] for path, (owner, _) in self._made_owners.items() if id(owner) in inside)
        return [*dict.fromkeys((*names, *itertools.chain(*sources)))]

    def bind(self, params: Mapping[str, mx.array]) -> None:
        """Compute with these arrays: those of all parameters, or of some."""
        self.bound |= params
        for name, array in params.items():
            for owner, attribute in self._owners.get(name, ()):
                owner[attribute] = array
        if self._derived is not None:
            for path, array in self._derived.of(self.bound, params.keys()).items():
                owner, attribute = self._made_owners[path]
                owner[attribute] = array

    def release(self) -> None:
        """Let go of the arrays until the next `bind`: what a model still reads is not changed in place, but copied."""
        nothing = mx.zeros(0)
        self.bound = dict.fromkeys(self.bound, nothing)
        for owner, attribute in itertools.chain(*self._owners.values(), self._made_owners.values()):
            owner[attribute] = nothing

    def trace(self, origins: Origins) -> None:
        """Do nothing: there are no adapters whose inputs could be made again."""

    def forget(self) -> None:
        """Do nothing: layers keep nothing for each other."""


def _stacks(model: nn.Module, base: BaseWeights, paths: Collection[str]) -> dict[str, str]:
    """Return the name of the stack that each of these parameters is, for experts that the files hold one by one."""
    stacks: dict[str, str] = {}
    for path, places in expert_places(model, base).items():
        expert = expert_of(places[0].tensor)
        tensors = [place.tensor for place in places]
        if f"{path}.weight" in paths and expert and tensors == members(expert.stack, len(places)):
            stacks[f"{path}.weight"] = expert.stack
    return stacks


def _derived_parameters(model: nn.Module, base: BaseWeights, paths: Collection[str]) -> MadeParameters:
    """Return what makes these parameters of the tensors of the files, but for constants."""
    parameters = MadeParameters(model, base, paths)
    if parameters.unknown:
        raise _cannot(parameters.unknown)
    return parameters.without(is_constant)


def _check(made: Mapping[str, mx.array], arrays: Mapping[str, mx.array]) -> None:
    """Raise ConfigError for parameters that are not made again as they were loaded, but for the rounding of 16 bits."""
    wrong: list[str] = []
    for path, array in made.items():
        largest = float(cast(float, mx.abs(array).max().item()))
        if not mx.allclose(array, arrays[path], rtol=1e-2, atol=1e-2 * largest, equal_nan=True):
            wrong.append(path)
    if wrong:
        raise _cannot(wrong)


def _cannot(paths: Collection[str]) -> ConfigError:
    return ConfigError(
        f"adapter.method: got full, but mlx-lm computes {len(paths)} of the parameters from the model's files in a way "
        f"that is not undone (for example {min(paths)}), so nothing else could load what is trained. Train it on "
        "torch, or set adapter.method: lora"
    )
