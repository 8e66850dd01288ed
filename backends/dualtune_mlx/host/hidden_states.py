"""Hidden states that come from the host, in place of the layers below the lowest adapter.

While a micro-batch has them, the first layers pass on what they get, and the last layer below the adapters returns the
given ones. mlx-lm's own loop over the layers, its embedding, positions and masks stay as they are, so no model needs
code of its own. Only the classes of these layers change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn

from dualtune.engine.backend import num_layers_below, returns_more_than_states


class FrozenLayers:
    """The layers of a model below its lowest adapted module."""

    def __init__(self, model: nn.Module, adapted: Collection[nn.Module]) -> None:
        """There are none if anything but a layer or the output head is adapted."""
        layers: list[Any] = list(cast(Any, model).layers)
        self._layers = layers[: num_layers_below((layer.modules() for layer in layers), adapted, model.get("lm_head"))]
        self.given: mx.array | None = None
        self.found: list[Any] | None = None  # collects what the last layer returns
        for layer in self._layers:
            layer.__class__ = _replaceable(type(layer))
            layer.frozen = self

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def replaced(self, given_BTD: mx.array | None) -> Iterator[None]:
        """Use these hidden states inside the block, in forward passes and in what a backward pass recomputes."""
        self.given = given_BTD
        try:
            yield
        finally:
            self.given = None

    def computed(self, run: Callable[[], object]) -> np.ndarray:
        """Return the hidden states that leave the last of these layers while `run` runs the model.

        Nothing else is computed: MLX evaluates only what is read.
        """
        self.found = []
        try:
            run()
            outputs = self.found
        finally:
            self.found = None
        if len(outputs) != 1 or not isinstance(outputs[0], mx.array):
            raise returns_more_than_states(type(self._layers[-1]).__module__)
        return to_numpy(outputs[0])

    def is_last(self, layer: object) -> bool:
        return layer is self._layers[-1]


class ReplaceableLayer:
    """A layer that computes nothing while its output is given."""

    frozen: FrozenLayers

    def __call__(self, *args: Any, **options: Any) -> Any:
        frozen, is_last = self.frozen, self.frozen.is_last(self)
        if frozen.given is not None:
            return frozen.given if is_last else [*args, *options.values()][0]  # its input, which some name
        plain: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]  of the class that this precedes
        output = plain(*args, **options)
        if is_last and frozen.found is not None:
            frozen.found.append(output)
        return output


@cache
def _replaceable(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (ReplaceableLayer, kind), {"__module__": kind.__module__})


def to_numpy(x: mx.array) -> np.ndarray:
    """Return the numbers; bfloat16, which NumPy does not have, as its bits in uint16."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def to_mlx(array: np.ndarray) -> mx.array:
    """Return what `to_numpy` was given."""
    return mx.array(array).view(mx.bfloat16) if array.dtype == np.uint16 else mx.array(array)
