"""The decoder layers whose frozen weights are in memory, and the files from which the others are read.

MLX reads an array of a safetensors file when the array is evaluated. All layers hold such arrays, so whatever computes
with a layer gets the right numbers. To drop a layer from memory is to replace its arrays by new, unevaluated ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx import nn

from dualtune.backend import LoadRequest
from dualtune.errors import ConfigError, EnvironmentFault

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
    if request.adapter.method != "lora":
        raise ConfigError(
            f"{problem}adapter.method: {request.adapter.method} needs weights of the base that stay in memory. "
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
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


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
    found = [stored[weight.name] for weight in weights]
    return LayerArrays(
        [array.astype(weight.dtype) for weight, array in zip(weights, found, strict=True)],
        any(weight.dtype != array.dtype for weight, array in zip(weights, found, strict=True)),
        sum(array.nbytes for array in found),
    )
