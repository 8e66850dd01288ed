"""A model that is trained whole (adapter.method: full): all its parameters are views of one flat float32 array.

In float32 it computes with these masters. In 16 bits it computes with a copy of them, and the gradient of the copy is
added to a float32 gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

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


class WholeModel(Bound):
    """The parameters of a model by the names of the base's files: what `AdaptedLayers` is for an adapter.

    What the files hold transposed (GPT-2's matrices) is trained as they hold it. A stack of experts that they hold one
    by one is one array here, by the name of the stack (`dualtune.model.experts`), and theirs in a state.
    """

    def __init__(self, model: nn.Module, base: BaseWeights | None, dropout_seeds: DropoutSeeds) -> None:
        """ConfigError for a parameter that is in the files in another way: its name would say nothing."""
        self.dropout_seeds, self.start = dropout_seeds, {}
        arrays = dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
        names = {path: path for path in arrays} if base is None else stored_names(model, base)
        self._transposed = set[str]()
        if base is not None and (other := arrays.keys() - names.keys()):
            transposed = _transposed(model, base, other)
            self._transposed.update(transposed.values())
            names |= transposed | _stacked(model, base, other)
        if other := sorted(arrays.keys() - names.keys()):
            raise ConfigError(
                f"adapter.method: got full, but mlx-lm computes {len(other)} of the parameters from the model's files "
                f"instead of reading them as they are (for example {other[0]}), so nothing else could load what is "
                "trained. Train it on torch, or set adapter.method: lora"
            )
        names = {path: names[path] for path in arrays}
        self.bound = {names[path]: self._turned(names[path], array) for path, array in arrays.items()}
        modules = dict(model.named_modules())
        self._owners: dict[str, tuple[Any, str]] = {}
        for path, name in names.items():
            owner, _, attribute = path.rpartition(".")
            self._owners[name] = modules[owner], attribute

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

    def _turned(self, name: str, array: mx.array) -> mx.array:
        """Turn an array of the model to the orientation of the files, or back."""
        return array.T if name in self._transposed else array

    def names_in(self, modules: Collection[nn.Module]) -> list[str]:
        """Return the names of the parameters of these modules, and of those inside them."""
        inside = {id(part) for module in modules for part in module.modules()}
        return [name for name, (owner, _) in self._owners.items() if id(owner) in inside]

    def bind(self, params: Mapping[str, mx.array]) -> None:
        """Compute with these arrays: those of all parameters, or of some."""
        self.bound |= params
        for name, array in params.items():
            owner, attribute = self._owners[name]
            owner[attribute] = self._turned(name, array)

    def release(self) -> None:
        """Let go of the arrays until the next `bind`: what a model still reads is not changed in place, but copied."""
        self.bind(dict.fromkeys(self.bound, mx.zeros(0)))

    def trace(self, origins: Origins) -> None:
        """Do nothing: there are no adapters whose inputs could be made again."""

    def forget(self) -> None:
        """Do nothing: layers keep nothing for each other."""


def _transposed(model: nn.Module, base: BaseWeights, paths: Collection[str]) -> dict[str, str]:
    """Return the tensors of the files that these parameters are the transposes of, by path."""
    modules = [path.removesuffix(".weight") for path in paths if path.endswith(".weight")]
    places = find_places(model, base, modules)
    return {f"{path}.weight": at.tensor for path, at in places.items() if at == FilePlace(at.tensor, transposed=True)}


def _stacked(model: nn.Module, base: BaseWeights, paths: Collection[str]) -> dict[str, str]:
    """Return the names of the stacks among these parameters whose matrices are tensors of their own, by path."""
    found: dict[str, str] = {}
    for path, places in expert_places(model, base, interleaved=False).items():
        expert, tensors = expert_of(places[0].tensor), [place.tensor for place in places]
        if expert and f"{path}.weight" in paths and tensors == members(expert.stack, len(places)):
            found[f"{path}.weight"] = expert.stack
    return found
