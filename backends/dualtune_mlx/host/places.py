"""Where the linear layers of an mlx-lm model lie in the files of its base: what its own `sanitize` does, followed.

`sanitize` renames, transposes, splits and joins what the files hold. It gets arrays of the files' names and shapes that
take no memory: what comes out as the same object was renamed, and of the rest, numbers that count tensors and rows
tell where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn

from dualtune.base.tensors import floats_of
from dualtune.model.merging import stored_bytes
from dualtune.model.places import FilePlace
from dualtune.model.weight_files import BaseWeights, StoredTensor

DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "F64": mx.float32, "U32": mx.uint32, "U8": mx.uint8,
    "I8": mx.int8, "I32": mx.int32, "I64": mx.int64,
}  # fmt: skip


def find_places(model: nn.Module, base: BaseWeights, modules: Iterable[str]) -> dict[str, FilePlace]:
    """Return the place of each module (by its path in the model) whose weight is one matrix of the files, or a part.

    A module that `sanitize` computes in another way, such as from several tensors or times a factor, has none.
    """
    names, marks = list(modules), _marks(base)
    sources = {id(array): name for name, array in marks.items()}
    sanitized = _sanitized(model, marks)
    places: dict[str, FilePlace] = {}
    other: list[str] = []
    for module in names:
        array = sanitized.get(f"{module}.weight")
        if array is not None and id(array) in sources:
            places[module] = FilePlace(sources[id(array)])
        elif array is not None:
            other.append(module)
    return places | (_followed(model, base, other) if other else {})


def stored_names(model: nn.Module, base: BaseWeights) -> dict[str, str]:
    """Return the tensor of the files that each parameter is, for those that are one tensor as it is."""
    marks = _marks(base)
    sources = {id(array): name for name, array in marks.items()}
    return {path: sources[id(array)] for path, array in _sanitized(model, marks).items() if id(array) in sources}


def _marks(base: BaseWeights, value: Callable[[int, tuple[int, ...]], mx.array] | None = None) -> dict[str, mx.array]:
    """Return an array for each tensor: zeros that are never computed, or floats of `value(number, shape)`."""
    marks: dict[str, mx.array] = {}
    for number, (name, tensor) in enumerate(base.tensors.items()):
        dtype = DTYPES.get(tensor.dtype, mx.uint8)
        if value is None or dtype not in (mx.float32, mx.float16, mx.bfloat16):
            marks[name] = mx.zeros(tensor.shape, dtype)
        else:
            marks[name] = value(number, tensor.shape)
    return marks


def _sanitized(model: nn.Module, marks: Mapping[str, mx.array]) -> dict[str, mx.array]:
    sanitize: Any = getattr(model, "sanitize", dict)
    return cast("dict[str, mx.array]", sanitize(dict(marks)))


def _followed(model: nn.Module, base: BaseWeights, modules: list[str]) -> dict[str, FilePlace]:
    """Return the places of weights that are views of a matrix of the files, from three numberings of all of them."""
    ones = _sanitized(model, _marks(base, lambda _, shape: mx.broadcast_to(mx.array(1.0), shape)))
    tensors = _sanitized(model, _marks(base, lambda number, shape: mx.broadcast_to(mx.array(float(number)), shape)))
    rows = _sanitized(model, _marks(base, _counted))
    stored, places = list(base.tensors), dict[str, FilePlace]()
    for module in modules:
        name = f"{module}.weight"
        if rows[name].ndim != 2 or not _is_all(ones[name], 1.0):
            continue
        number = _borders(tensors[name])[0][0]
        if not (number.is_integer() and _is_all(tensors[name], number)):
            continue
        place = _place(stored[int(number)], base, rows[name])
        if place is not None:
            places[module] = place
    return places


def _counted(_: int, shape: tuple[int, ...]) -> mx.array:
    """Return the numbers of the rows of a tensor, each in all of its row."""
    length, *others = shape or (1,)
    return mx.broadcast_to(mx.arange(length).astype(mx.float32).reshape(length, *[1] * len(others)), shape)


def _borders(array: mx.array) -> tuple[list[float], list[float]]:
    """Return the first column and the first row of a matrix: all that the numberings differ in."""
    column, row = array[:, 0].astype(mx.float32), array[0, :].astype(mx.float32)
    return np.array(column).tolist(), np.array(row).tolist()


def _is_all(array: mx.array, value: float) -> bool:
    return array.ndim == 2 and all(number == value for border in _borders(array) for number in border)


def _place(tensor: str, base: BaseWeights, rows: mx.array) -> FilePlace | None:
    """Return the place of a matrix whose numbers are those of the rows of the tensor; None if it has them mixed up."""
    stored = base.tensors[tensor].shape
    column, row = _borders(rows)
    if row == list(map(float, range(stored[0]))) and len(set(column)) == 1:
        return FilePlace(tensor, transposed=True) if len(column) == stored[1] else None
    first = int(column[0])
    if column == list(map(float, range(first, first + len(column)))) and len(set(row)) == 1 and len(row) == stored[1]:
        return FilePlace(tensor, rows=None if len(column) == stored[0] else (first, first + len(column)))
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Full fine-tuning: parameters made of what is trained, as `sanitize` makes them of the files.


class MadeParameters:
    """Parameters of a model that `sanitize` makes of the files' tensors: turned, cut, joined, scaled, shifted.

    It does so with any arrays in the place of the tensors, lazily, and gradients go back through it.
    """

    def __init__(self, model: nn.Module, base: BaseWeights, paths: Collection[str]) -> None:
        self._model, self._marks = model, _marks(base)
        sources = _sources(model, base, paths)
        self.unknown = [path for path, names in sources.items() if names is None]
        # The tensors that each parameter depends on; none for a constant, which the files do not hold.
        self.sources = {path: names for path, names in sources.items() if names is not None}

    @property
    def tensors(self) -> set[str]:
        """The tensors that these parameters are made of."""
        return {name for names in self.sources.values() for name in names}

    def without(self, is_left_out: Callable[[str], bool]) -> MadeParameters:
        """Return itself without the parameters that are made of such a tensor."""
        self.sources = {path: names for path, names in self.sources.items() if not any(map(is_left_out, names))}
        return self

    def of(self, tensors: Mapping[str, mx.array], changed: Collection[str]) -> dict[str, mx.array]:
        """Return the parameters that depend on `changed`, made of `tensors`."""
        paths = [path for path, names in self.sources.items() if any(name in changed for name in names)]
        if not paths:
            return {}
        needed = {name for path in paths for name in self.sources[path]}
        sanitized = _sanitized(self._model, self._marks | {name: tensors[name] for name in needed})
        return {path: sanitized[path] for path in paths}


def read_tensor(stored: StoredTensor) -> mx.array:
    """Return a tensor of the files, float32."""
    return mx.array(floats_of(stored_bytes(stored), stored.dtype).reshape(stored.shape))


def _sources(model: nn.Module, base: BaseWeights, paths: Collection[str]) -> dict[str, list[str] | None]:
    """Return the tensors of which each parameter is made, each number of one; None if it is made in another way.

    Each tensor is filled with zeros, with ones and with its own number, which tells the scale, the shift and the tensor
    of every number of a parameter.
    """
    zeros, ones, numbers = (
        _sanitized(model, _marks(base, lambda number, shape, of=of: mx.broadcast_to(mx.array(of(number)), shape)))
        for of in (lambda _: 0.0, lambda _: 1.0, float)
    )
    stored, sources = list(base.tensors), dict[str, list[str] | None]()
    for path in sorted(paths):
        scale = ones[path] - zeros[path]
        positions = np.array(mx.where(scale == 0, -1.0, (numbers[path] - zeros[path]) / mx.where(scale == 0, 1, scale)))
        whole = np.rint(positions)
        is_one = np.abs(positions - whole).max() <= 0.01 and whole.max() < len(stored)
        sources[path] = [stored[int(number)] for number in np.unique(whole) if number >= 0] if is_one else None
    return sources
