"""A result that is computed once for the layers that are called with the same array, one after another.

Their names tell which layers these are (`dualtune.model.dropout.input_of`), but a name proves nothing: every call
checks that the array is the same one, and computes anew for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

Layer = TypeVar("Layer")
Array = TypeVar("Array")


class OncePerInput(Generic[Layer, Array]):
    """The results of layers with one input. The first layer that is called has those of all computed."""

    def __init__(self) -> None:
        self.x: Any = None
        self.waiting: dict[Layer, Array] = {}  # results that their layers have not fetched yet

    def fetch(self, layer: Layer, x: Array, compute: Callable[[Array], Mapping[Layer, Array]]) -> Array:
        """Return the result of a layer for its input, of those of all layers that `compute` returns."""
        if x is not self.x or layer not in self.waiting:
            self.x, self.waiting = x, {**compute(x)}
        own = self.waiting.pop(layer)
        if not self.waiting:
            self.x = None  # it is kept no longer than needed
        return own

    def forget(self) -> None:
        """Drop the results that no layer has fetched, as after an interrupted forward pass."""
        self.x, self.waiting = None, {}
