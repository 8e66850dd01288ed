"""The two passes over a model whose layers are not all in memory: one layer at a time.

MLX evaluates in any order, so each layer is evaluated before the next one is called. Training keeps the input of each
layer; the backward pass goes from the last layer to the first and computes each one again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dualtune.activation_checkpointing import ActivationCheckpointing
from dualtune.errors import ConfigError
from dualtune_mlx.methods import AdaptedLayers
from dualtune_mlx.streaming.residency import KEY, Residency

Arrays = dict[str, mx.array]
Run = Callable[[mx.array], mx.array]  # a layer, as a function of the hidden states
PROBE = 4  # tokens to test whether the layers of a model can be streamed


class Streaming:
    """The layers of a model, which compute one at a time. Only their classes change.

    It takes the place of `Recomputation`: all layers are recomputed.
    """

    def __init__(self, model: nn.Module, residency: Residency, adapter: AdaptedLayers) -> None:
        """ConfigError if the model does not just pass hidden states from each layer to the next."""
        self.residency = residency
        self.num_layers = residency.num_layers
        self._model = model
        self._adapter = adapter
        layers: list[Any] = list(cast(Any, model).layers)
        self._names = [adapter.names_in([layer]) for layer in layers]
        # The backward pass ends at the lowest adapted layer.
        self._lowest = next((number for number, names in enumerate(self._names) if names), self.num_layers)
        self._recording: Recording | None = None
        self._end: mx.array | None = None
        for number, layer in enumerate(layers):
            layer.__class__ = _streamed(type(layer))
            layer.number, layer.streaming = number, self
        self._check_model()

    def choose(self, checkpointing: ActivationCheckpointing) -> ActivationCheckpointing:
        """Return what is recomputed: all layers. ConfigError if the config says otherwise."""
        if checkpointing.num_recomputed(self.num_layers) < self.num_layers - 1 or checkpointing.every > 1:
            raise ConfigError(
                f"memory.checkpointing: got '{checkpointing.describe(self.num_layers)}', but with {KEY} each layer is "
                "read and computed again in the backward pass; allowed: auto, full"
            )
        at_once = f"{KEY}: {self.residency.most} of {self.num_layers} layers are in memory at once"
        return ActivationCheckpointing(self.num_layers, reason=at_once)

    def value_and_grad(self, function: Callable[[Arrays], mx.array], params: Arrays) -> tuple[mx.array, Arrays]:
        """Return `mx.value_and_grad(function)(params)`, evaluated; `function` binds the parameters, calls the model."""
        forward = self._forward(function, params)
        loss, slope, slopes = self._after_layers(function, params, forward.end)
        mx.eval(loss, slope, slopes)
        while forward.calls:
            number, run, x = forward.calls.pop()
            self.residency.use(number, number - 1 if forward.calls else None)
            slope, *found = self._layer_slopes(number, run, x, slope, params)
            mx.eval(found, slope if forward.calls else [])  # nothing needs the slope below the lowest layer
            slopes |= zip(self._names[number], found, strict=True)
        return loss, slopes

    def call(self, number: int, layer: Callable[..., mx.array], x: Any, *args: Any, **options: Any) -> Any:
        """Return what the layer returns, evaluated; while the rest is differentiated, what it has returned before."""
        if self._end is not None:
            # What a model computes from anything but the last result shows as NaN.
            return self._end if number == self.num_layers - 1 else mx.full(x.shape, mx.nan, x.dtype)
        self.residency.use(number, number + 1 if number + 1 < self.num_layers else None)
        result = layer(x, *args, **options)
        mx.eval(result)
        if self._recording is not None:
            arrays = [x, result, *(value for _, value in cast(Any, tree_flatten([args, options])))]
            self._recording.add(number, lambda x: layer(x, *args, **options), arrays)
        return result

    def _forward(self, function: Callable[[Arrays], mx.array], params: Arrays) -> Recording:
        """Return the calls of the layers. What the function computes after them is not evaluated."""
        recording = self._recording = Recording(self._lowest)
        try:
            function(params)
        finally:
            self._recording = None
        if not recording.is_chain or recording.count != self.num_layers:
            raise self._refusal()
        return recording

    def _after_layers(
        self, function: Callable[[Arrays], mx.array], params: Arrays, end: mx.array
    ) -> tuple[mx.array, mx.array, Arrays]:
        """Return the loss, its gradient by the last hidden states, and by the parameters outside of the layers."""

        def of(end: mx.array, outside: Arrays) -> mx.array:
            self._end = end
            return function(params | outside)

        try:
            loss, (slope, slopes) = mx.value_and_grad(of, argnums=(0, 1))(end, self._outside(params))
        finally:
            self._end = None
        return loss, slope, slopes

    def _layer_slopes(self, number: int, run: Run, x: mx.array, slope: mx.array, params: Arrays) -> list[mx.array]:
        """Return the gradient by the input of a layer, and by its parameters, from that by its output."""
        names = self._names[number]

        def of(x: mx.array, *values: mx.array) -> mx.array:
            with self._adapter.binding(dict(zip(names, values, strict=True))):
                return run(x)

        return mx.vjp(of, [x, *(params[name] for name in names)], [slope])[1]

    def _outside(self, params: Mapping[str, mx.array]) -> Arrays:
        inside = {name for names in self._names for name in names}
        return {name: value for name, value in params.items() if name not in inside}

    def _check_model(self) -> None:
        """Let a few tokens through: parameters before the layers, or results that bypass the last one, become NaN."""

        def probe(params: Arrays) -> mx.array:
            with self._adapter.binding(params):
                return mx.logsumexp(self._model(mx.arange(PROBE)[None]).astype(mx.float32), axis=-1).sum()

        params = dict(self._adapter.bound)
        unknown = {name: mx.full(value.shape, mx.nan) for name, value in self._outside(params).items()}
        end = self._forward(probe, params | unknown).end
        loss, *_ = self._after_layers(probe, params, end)
        if not mx.isfinite(loss).item():
            raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            f"{KEY}: the layers of this model ({type(self._model).__module__}) exchange more than their hidden states, "
            f"so they cannot be computed one by one. Set {KEY}: all"
        )


class Recording:
    """The calls of the layers in a forward pass, from the lowest layer that has a backward pass."""

    def __init__(self, lowest: int) -> None:
        self.calls: list[tuple[int, Run, mx.array]] = []
        self.count = 0
        self.is_chain = True  # whether each layer was called once, with the result of the one before and no other
        self._lowest = lowest
        self._end: Any = None

    @property
    def end(self) -> mx.array:
        """The result of the last layer."""
        return self._end

    def add(self, number: int, run: Run, arrays: list[Any]) -> None:
        """Add a call; `arrays`: the hidden states that the layer got, its result, and its other arguments."""
        x, result, *others = arrays
        hidden = [other for other in others if isinstance(other, mx.array) and mx.issubdtype(other.dtype, mx.floating)]
        self.is_chain &= number == self.count and (number == 0 or x is self._end) and not hidden
        self.is_chain &= isinstance(x, mx.array) and isinstance(result, mx.array)
        self.count, self._end = number + 1, result
        if number >= self._lowest:
            self.calls.append((number, run, x))


class StreamedLayer:
    """A decoder layer that computes when `Streaming` lets it."""

    number: int
    streaming: Streaming

    def __call__(self, *args: Any, **options: Any) -> Any:
        plain: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]  of the class that this precedes
        return self.streaming.call(self.number, plain, *args, **options)


@cache
def _streamed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (StreamedLayer, kind), {})
