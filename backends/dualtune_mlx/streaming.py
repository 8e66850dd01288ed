"""The two passes over a model whose layers are not all in memory: one layer at a time.

MLX evaluates in any order, so each layer is evaluated before the next one is called. Training keeps the input of each
layer; the backward pass goes from the last layer to the first and computes each one again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import ActivationCheckpointing
from dualtune_mlx.methods import AdaptedLayers

# ----------------------------------------------------------------------------------------------------------------------
# The decoder layers whose frozen weights are in memory, and the files from which the others are read.
#
# MLX reads an array of a safetensors file when the array is evaluated. All layers hold such arrays, so whatever
# computes with a layer gets the right numbers. To drop a layer from memory is to replace its arrays by new, unevaluated
# ones.

KEY = "memory.resident_layers"


class FrozenWeight(NamedTuple):
    """A place in a layer that holds a frozen array."""

    module: nn.Module
    part: str  # its name in the module
    name: str  # its name in the model, as mlx-lm reads it
    dtype: mx.Dtype  # the one it is computed with


class LayerArrays(NamedTuple):
    """The arrays for the frozen weights of a layer. Each is read from its file when it is evaluated."""

    arrays: list[mx.array]
    is_cast: bool  # whether any of them is stored in another dtype
    stored_bytes: int


def check_streamable(request: LoadRequest, quantization: str, *, is_stored: bool) -> None:
    """Raise ConfigError if layers of this base cannot be read from its files each time they compute."""
    if request.resident_layers is None:
        return
    problem = f"{KEY}: got {request.resident_layers}, but "
    if request.init == "random":
        raise ConfigError(f"{problem}with model.init: random the weights are in no file to read from. Set {KEY}: all")
    if request.adapter.trains_model:
        raise ConfigError(
            f"{problem}adapter.method: full trains the base, and only a frozen one is read from files. "
            f"Set adapter.method: lora, or {KEY}: all"
        )
    if quantization == "none" or is_stored:
        return
    problem += (
        f"{quantization} is made when a model is loaded, and a layer would be quantized again whenever it is read. "
    )
    if quantization == "int8":
        raise ConfigError(f"{problem}For int8 there is none: set model.quantization: none, or {KEY}: all")
    raise ConfigError(
        f"{problem}Store the quantized model once, with mlx_lm.convert --hf-path {request.model_dir} --mlx-path NEW "
        f"-q --q-bits {quantization.removeprefix('affine')} --q-group-size 64, and set model.name: NEW"
    )


class Residency:
    """At most `most` decoder layers of a model are in memory; the least recently used one makes room for the next."""

    def __init__(self, model: nn.Module, files: Sequence[Path], most: int) -> None:
        """No layer is in memory at first. ConfigError if a weight of a layer is in no file."""
        self.most = most
        self.bytes_read = 0  # of the files, so far
        self._sanitize: Any = getattr(model, "sanitize", lambda stored: stored)
        self._files = {file: _state(file) for file in files}
        paths = {id(module): path for path, module in model.named_modules()}
        self._weights = [_weights(layer, paths) for layer in cast(Any, model).layers]
        self._resident: OrderedDict[int, LayerArrays] = OrderedDict()  # the least recently used first
        self._unread: dict[int, LayerArrays] = {}  # for the layers, after what they hold now
        self._held: dict[int, LayerArrays] = {}
        for number in range(self.num_layers):
            self._drop(number)

    @property
    def num_layers(self) -> int:
        return len(self._weights)

    def use(self, number: int, following: int | None = None) -> None:
        """Have a layer in memory, and start to read the one that computes after it, if both may be there."""
        self._start(number)
        mx.eval(self._resident[number].arrays)
        if following is not None and self.most > 1:
            self._start(following)

    def bring(self, part: nn.Module) -> None:
        """Have the layer that has this part in memory, so that its weights can be read."""
        for number, weights in enumerate(self._weights):
            if any(weight.module is part for weight in weights):
                self.use(number)

    def _start(self, number: int) -> None:
        """Start to read a layer, unless it is in memory."""
        if number in self._resident:
            self._resident.move_to_end(number)
            return
        self._check_files()
        while len(self._resident) >= self.most:
            self._drop(next(iter(self._resident)))
        layer = self._resident[number] = self._held[number]
        if layer.is_cast:
            for array in layer.arrays:  # one by one: MLX would read many of them before it has cast the first
                mx.eval(array)
        mx.async_eval(layer.arrays)
        self.bytes_read += layer.stored_bytes

    def _drop(self, number: int) -> None:
        """Give a layer new arrays, which are not evaluated."""
        if number not in self._unread:
            self._unread = self._lazy_layers()
        self._held[number] = self._unread.pop(number)
        for weight, array in zip(self._weights[number], self._held[number].arrays, strict=True):
            weight.module[weight.part] = array
        self._resident.pop(number, None)
        mx.synchronize()  # what has computed with the old arrays holds them until it has ended

    def _lazy_layers(self) -> dict[int, LayerArrays]:
        """Return new arrays for all layers. Only the headers of the files are read."""
        self._check_files()
        stored: dict[str, mx.array] = {}
        with mx.stream(_reader()):
            for file in self._files:
                stored |= cast(dict[str, mx.array], mx.load(str(file)))
            stored = self._sanitize(stored)
            return {number: _lazy_layer(weights, stored) for number, weights in enumerate(self._weights)}

    def _check_files(self) -> None:
        """Raise EnvironmentFault if a file is not the one that was checked and fingerprinted before."""
        for file, state in self._files.items():
            if _state(file) != state:
                raise EnvironmentFault(
                    f"{file}: this file has changed or is gone since the model was loaded, and with {KEY} its layers "
                    "are read in every step. Restore the file, then resume with the same command"
                )


@cache
def _reader() -> mx.Stream:
    """A stream only for reading, so that a layer is read while another one computes. MLX reads files on the CPU."""
    return mx.new_stream(mx.cpu)


def _state(file: Path) -> tuple[int, int, int] | None:
    """Return what changes if a file is written or replaced; None if there is no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _weights(layer: nn.Module, paths: Mapping[int, str]) -> list[FrozenWeight]:
    return [
        FrozenWeight(module, part, f"{paths[id(module)]}.{part}", value.dtype)
        for module in layer.modules()
        for part, value in module.items()
        if isinstance(value, mx.array) and not part.startswith("_")  # those are computed, and in no file
    ]


def _lazy_layer(weights: Sequence[FrozenWeight], stored: Mapping[str, mx.array]) -> LayerArrays:
    if absent := [weight.name for weight in weights if weight.name not in stored]:
        raise ConfigError(
            f"{KEY}: the files of this model do not have {absent[0]} as mlx-lm computes with it, so its layers cannot "
            f"be read one by one. Set {KEY}: all"
        )
    arrays = [stored[weight.name] for weight in weights]
    return LayerArrays(
        [array.astype(weight.dtype) for weight, array in zip(weights, arrays, strict=True)],
        any(weight.dtype != array.dtype for weight, array in zip(weights, arrays, strict=True)),
        sum(array.nbytes for array in arrays),
    )


# ----------------------------------------------------------------------------------------------------------------------
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
            slope, *of_params = self._layer_slopes(number, run, x, slope, params)
            mx.eval(of_params, slope if forward.calls else [])  # nothing needs the slope below the lowest layer
            slopes |= zip(self._names[number], of_params, strict=True)
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
        """Run the model on few tokens: parameters before the layers, or results that bypass the last, become NaN."""

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
