"""Where the matrix of a linear layer lies in the files of its base model, and what the layer is called after that.

The canonical name of an adapted layer is that of its tensor in the base's files: both backends read it there, however
their own classes name, transpose or split the layer. Other names are matched with the files by what they have in
common with them: the path from the stack of layers on, which no wrapper around a text model changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dualtune.adapter.formats.gpt2 import canonical_layer
from dualtune.adapter.targets import is_text as is_text
from dualtune.adapter.targets import matched
from dualtune.errors import ConfigError


class FilePlace(NamedTuple):
    """A matrix [out, in] in the files of a base model."""

    tensor: str
    transposed: bool = False  # the files have [in, out]
    rows: tuple[int, int] | None = None  # of a larger matrix [out, in] that the tensor is; None: all of it

    @property
    def module(self) -> str:
        """The canonical name of the layer. Parts of one matrix share a place's tensor, and need names of their own."""
        return canonical_layer(self.tensor.removesuffix(".weight"), None)[0]


def canonical_names(places: Mapping[str, FilePlace]) -> dict[str, str]:
    """Return the canonical name of each placed module of a backend's model, by its path there.

    A part of a fused matrix is called after the matrix and the last component of its own path.
    """
    return {
        path: place.module if place.rows is None else f"{place.module}.{path.rpartition('.')[2]}"
        for path, place in places.items()
    }


def check_places(modules: Iterable[str], placed: Collection[str], library: str) -> None:
    """Raise ConfigError for an adapted module whose weight is not one matrix of the base's files: it could not move."""
    if unplaced := [module for module in modules if module not in placed]:
        raise ConfigError(
            f"adapter.targets: {library} computes the weight of {len(unplaced)} of the adapted modules from several "
            f"tensors of the model's files, or scales it (for example {unplaced[0]}), so no other program could load "
            "the adapter. Choose other targets, or the other backend"
        )


def file_names(modules: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Return the canonical name of each module, by the names that the base's files have for their linear layers."""
    return matched(modules, {canonical_layer(name, None)[0] for name in stored})
