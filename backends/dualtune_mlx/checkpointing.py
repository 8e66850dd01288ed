"""Activation checkpointing: a segment of decoder layers keeps its input, and its backward pass computes the rest again.

`mx.checkpoint` recomputes too, but MLX evaluates in any order: it may recompute many segments before it uses the first,
and compute the adapter's gradients of all segments last, whose inputs then stay. Here both have their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from dualtune.base.errors import ConfigError
from dualtune.engine.card import ActivationCheckpointing
from dualtune_mlx.adapter import WholeModel
from dualtune_mlx.adapter_inputs import Origins
from dualtune_mlx.methods import AdaptedLayers, DropoutSeeds

PROBE = 4  # tokens to test whether the layers of a model can be recomputed


class Recomputation:
    """The decoder layers of a model, some of them recomputed. Only the classes of the layers change."""

    def __init__(self, model: nn.Module, adapter: AdaptedLayers | WholeModel) -> None:
        self._model = model
        self._adapter = adapter
        self._layers: list[Any] = list(cast(Any, model).layers)
        self._segments: list[Segment] = []
        self._origins = Origins()
        self._inputs_again = False
        adapter.trace(self._origins)
        for layer in self._layers:
            layer.__class__ = _recomputable(type(layer))

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def choose(self, checkpointing: ActivationCheckpointing) -> ActivationCheckpointing:
        """Recompute as asked from now on, and return it. ConfigError, and nothing changes, if this model does not
        allow it."""
        segments: list[Segment] = []
        for every in sorted({1, checkpointing.every}):  # one by one first, which also shows what a layer returns
            spans = replace(checkpointing, every=every).segments(self.num_layers)
            segments = [Segment([self._layers[i] for i in span], self._adapter) for span in spans]
            if segments and not self._is_exact(segments):
                raise ConfigError(
                    f"memory.checkpointing: the layers of this model ({type(self._model).__module__}) exchange more "
                    "than their hidden states, or are not called as wholes, so they cannot be recomputed; allowed: "
                    "none, adapter_inputs"
                )
        if checkpointing.adapter_inputs:
            self._origins.install(self._model)
        self._segments, self._inputs_again = segments, checkpointing.adapter_inputs
        return checkpointing

    def value_and_grad(
        self, function: Callable[[dict[str, mx.array]], mx.array], params: dict[str, mx.array]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """Return the value of a function of what is trained, and its gradients by name."""
        with self.active():
            return mx.value_and_grad(function)(params)

    @contextmanager
    def active(self, segments: list[Segment] | None = None) -> Iterator[None]:
        """Recompute in the backward pass of what is computed here. It has to be within the context too."""
        segments = self._segments if segments is None else segments
        try:
            for segment in segments:
                segment.enter()
            with self._origins.kept() if self._inputs_again else nullcontext():
                yield
        finally:
            for segment in segments:
                segment.leave()

    def _is_exact(self, segments: list[Segment]) -> bool:
        """Return whether a few tokens get the same gradient: models pass values between layers in many ways."""

        def probe(params: dict[str, mx.array]) -> mx.array:
            with self._adapter.binding(params):
                return mx.logsumexp(self._model(mx.arange(PROBE)[None]).astype(mx.float32), axis=-1).sum()

        params = dict(self._adapter.bound)
        plain = mx.grad(probe)(params)
        try:
            with self.active(segments):
                slopes = mx.grad(probe)(params)
        except NotRecomputable:
            return False
        are_equal = all(bool(mx.allclose(slopes[name], plain[name], equal_nan=True)) for name in params)
        return are_equal and all(segment.was_called for segment in segments)


class NotRecomputable(Exception):
    """A layer whose arguments or result are not those of a function of the hidden states."""


class Segment:
    """Consecutive decoder layers. The calls of all but the last wait until the last is called.

    `was_called`: whether the model calls them at all. IQuest-LoopCoder calls the parts of its layers.
    """

    def __init__(self, layers: list[Any], adapter: AdaptedLayers | WholeModel) -> None:
        self._layers = layers
        self._adapter = adapter
        self._names = adapter.names_in(layers)
        self._waiting: list[Callable[[mx.array], mx.array]] = []
        self.was_called = False

    def enter(self) -> None:
        for layer in self._layers:
            layer.segment = self

    def leave(self) -> None:
        self._waiting = []
        for layer in self._layers:
            layer.segment = None

    def call(self, layer: Callable[..., mx.array], x: Any, *args: Any, **options: Any) -> mx.array:
        """Return the output of the segment if this is its last layer; else x, which is passed to the next layer."""
        if not isinstance(x, mx.array):
            raise NotRecomputable
        self._waiting.append(lambda x: layer(x, *args, **options))
        if len(self._waiting) < len(self._layers):
            return x
        calls, self._waiting, self.was_called = self._waiting, [], True
        run = recomputed(partial(self._run, calls), self._adapter.dropout_seeds)
        return run(x, *(self._adapter.bound[name] for name in self._names))

    def _run(self, calls: list[Callable[[mx.array], mx.array]], x: mx.array, *params: mx.array) -> mx.array:
        with self._adapter.binding(dict(zip(self._names, params, strict=True))):
            for call in calls:
                x = call(x)
        if not isinstance(x, mx.array):
            raise NotRecomputable
        return x


class RecomputableLayer:
    """A decoder layer that leaves its call to its segment, if it is in one."""

    segment: Segment | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        plain: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]  of the class that this precedes
        return plain(*args, **options) if self.segment is None else self.segment.call(plain, *args, **options)


@cache
def _recomputable(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (RecomputableLayer, kind), {})


def recomputed(function: Callable[..., mx.array], dropout_seeds: DropoutSeeds) -> Callable[..., mx.array]:
    """Return the function of arrays, whose backward pass calls it again instead of keeping what it computed.

    Of its inputs, the first is the output of the function before; the others are parameters.
    """
    segment: Any = mx.custom_function(lambda inputs: function(*inputs))

    @segment.vjp
    def _(inputs: list[mx.array], slope: mx.array, _: mx.array) -> list[mx.array]:
        inputs = mx.depends(inputs, [slope])  # else it could be recomputed long before it is needed
        with dropout_seeds.after(slope):
            dx, *slopes = mx.vjp(function, inputs, [slope])[1]
        return [*mx.depends([dx], slopes), *slopes]  # else the inputs of the parameters' slopes would stay till the end

    return lambda *inputs: segment([*inputs])
