"""Which layers attend document by document, and which keep the scores of whole rows.

The model reads a packed row of a few tokens. MLX evaluates nothing of it, so that neither weights nor time are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn

from dualtune_mlx.kernels import attention
from dualtune_mlx.methods import DropoutSeeds
from dualtune_mlx.packing import accept_positions, packed_cache, separate_documents

LENGTHS = (8, 8)  # tokens of the documents
ERRORS = (TypeError, AttributeError, ValueError, LookupError, RuntimeError)  # of a model that reads no packed rows


@dataclass(slots=True)
class Heads:
    """How many heads attend, by number of layer."""

    by_document: Counter[int] = field(default_factory=Counter)
    whole: Counter[int] = field(default_factory=Counter)


class _Noted(attention.Attention):
    """The attention of an engine, which notes how each call is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.layer = Heads(), -1
        self.pieces = [(length, True) for length in LENGTHS]

    def replaces(self, plain: Any) -> Any:
        def noted(queries: mx.array, *args: Any, **options: Any) -> mx.array:
            self.found.whole[self.layer] += queries.shape[1]
            return plain(queries, *args, **options)

        attend = super().replaces(noted)

        def call(queries: mx.array, *args: Any, **options: Any) -> mx.array:
            before = self.found.whole[self.layer]
            result = attend(queries, *args, **options)
            if self.found.whole[self.layer] == before:
                self.found.by_document[self.layer] += queries.shape[1]
            return result

        return call


def heads_of(model: nn.Module, layers: Sequence[nn.Module]) -> Heads | None:
    """Return the heads that attend in each layer; None for a model that does not read packed rows."""
    noted = _Noted()
    accept_positions(model)
    separate_documents(model, DropoutSeeds())
    attention.install(model, noted)
    segments = mx.array([[i for i, length in enumerate(LENGTHS, start=1) for _ in range(length)]])
    positions = mx.array([[i for length in LENGTHS for i in range(length)]])
    try:
        with _told(layers, noted):
            model(mx.zeros(segments.shape, mx.int32), cache=packed_cache(model, segments, positions))
    except ERRORS:
        return None
    return noted.found


@contextmanager
def _told(layers: Sequence[nn.Module], noted: _Noted) -> Iterator[None]:
    """Let each layer say that it computes."""
    kinds = [type(layer) for layer in layers]

    def tells(kind: type[nn.Module], number: int) -> type[nn.Module]:
        def call(self: nn.Module, *args: Any, **options: Any) -> Any:
            noted.layer = number
            return kind.__call__(self, *args, **options)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]

        return type(kind.__name__, (kind,), {"__call__": call})

    try:
        for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            layer.__class__ = tells(kind, number)
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
