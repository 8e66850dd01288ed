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
from dualtune.model.weight_files import BaseWeights
from dualtune_mlx.adapter_inputs import Origins
from dualtune_mlx.host.places import stored_names
from dualtune_mlx.methods import Bound, DropoutSeeds


class WholeModel(Bound):
    """The parameters of a model by the names of the base's files: what `AdaptedLayers` is for an adapter."""

    def __init__(self, model: nn.Module, base: BaseWeights | None, dropout_seeds: DropoutSeeds) -> None:
        """ConfigError for a parameter that is not one tensor of the files as it is: its name would say nothing."""
        self.dropout_seeds, self.start = dropout_seeds, {}
        self.bound: dict[str, mx.array] = dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
        names = {path: path for path in self.bound} if base is None else stored_names(model, base)
        if other := sorted(self.bound.keys() - names.keys()):
            raise ConfigError(
                f"adapter.method: got full, but mlx-lm computes {len(other)} of the parameters from the model's files "
                f"instead of reading them as they are (for example {other[0]}), so nothing else could load what is "
                "trained. Train it on torch, or set adapter.method: lora"
            )
        names = {path: names[path] for path in self.bound}
        self.bound = {names[path]: array for path, array in self.bound.items()}
        modules = dict(model.named_modules())
        self._owners: dict[str, tuple[Any, str]] = {}
        for path, name in names.items():
            owner, _, attribute = path.rpartition(".")
            self._owners[name] = modules[owner], attribute

    def state(self) -> Tensors:
        """Return copies of what is bound, float32."""
        return {name: np.array(array.astype(mx.float32)) for name, array in sorted(self.bound.items())}

    def names_in(self, modules: Collection[nn.Module]) -> list[str]:
        """Return the names of the parameters of these modules, and of those inside them."""
        inside = {id(part) for module in modules for part in module.modules()}
        return [name for name, (owner, _) in self._owners.items() if id(owner) in inside]

    def bind(self, params: Mapping[str, mx.array]) -> None:
        """Compute with these arrays: those of all parameters, or of some."""
        self.bound |= params
        for name, array in params.items():
            owner, attribute = self._owners[name]
            owner[attribute] = array

    def release(self) -> None:
        """Let go of the arrays until the next `bind`: what a model still reads is not changed in place, but copied."""
        self.bind(dict.fromkeys(self.bound, mx.zeros(0)))

    def trace(self, origins: Origins) -> None:
        """Do nothing: there are no adapters whose inputs could be made again."""

    def forget(self) -> None:
        """Do nothing: layers keep nothing for each other."""
