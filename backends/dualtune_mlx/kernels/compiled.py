"""`mx.compile` for a bounded number of shapes.

MLX recompiles a function for every combination of input shapes and drops none: with varied batches the process runs out
of memory or of Metal's resources (https://github.com/ml-explore/mlx/issues/4464). Here each combination has a separate
compiled function, and the least recently used one is dropped. Whether a batch runs compiled never depends on earlier
batches, so a resumed run computes the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

# ----------------------------------------------------------------------------------------------------------------------
# Functions that mlx-lm's modules call by a name in their own file, replaced for the modules of one model.
#
# These get a copy of their `__call__` in which the name is another function. mlx-lm's files, and other models in the
# process, do not change.

Function = Callable[..., Any]


def replace_name(model: nn.Module, name: str, replaces: Callable[[Function], Function]) -> int:
    """Make the modules of a model call `replaces(function)` for the function of this name, by changing their classes.
    Returns how many were changed."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    changed = 0
    for module in model.modules():
        kind = type(module)
        call = kind.__call__
        if not isinstance(call, FunctionType) or name not in call.__code__.co_names or name not in call.__globals__:
            continue
        if kind not in classes:
            names = call.__globals__ | {name: replaces(call.__globals__[name])}
            copy = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
            copy.__kwdefaults__ = call.__kwdefaults__
            classes[kind] = cast(type[nn.Module], type(kind.__name__, (kind,), {"__call__": copy}))
        module.__class__ = classes[kind]
        changed += 1
    return changed


# ----------------------------------------------------------------------------------------------------------------------
MAX_SHAPES = 32


class Compiled:
    """A function of arrays, or of dictionaries of arrays, compiled for each combination of their shapes.

    `state`: what else the function depends on; it is compiled for each of its values, too.
    """

    def __init__(
        self, function: Callable[..., Any], max_shapes: int = MAX_SHAPES, state: Callable[[], Hashable] = lambda: None
    ) -> None:
        self._function = function
        self._state = state
        self._max_shapes = max_shapes
        self._by_shape: OrderedDict[Any, Callable[..., Any]] = OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        leaves = cast(list[tuple[str, Any]], tree_flatten(inputs))
        key = self._state(), *((name, a.shape, a.dtype) for name, a in leaves)
        if key in self._by_shape:
            self._by_shape.move_to_end(key)
        else:
            function = self._function
            # A new function object for each, because MLX caches compiled code by the function's address.
            self._by_shape[key] = mx.compile(lambda *arrays: function(*arrays))
            if len(self._by_shape) > self._max_shapes:
                self._by_shape.popitem(last=False)
        return self._by_shape[key](*inputs)


def why_not() -> str | None:
    """Return why nothing can be compiled here, or None. On a CPU, MLX calls the C++ compiler at run time."""
    if mx.default_device().type == mx.DeviceType.cpu and shutil.which("g++") is None:
        return "MLX needs g++ to compile on a CPU, and it is not installed"
    return None


def why_not_worth_it() -> str | None:
    """Return why compiling does not pay off here, or None.

    On a CPU a compiled step is no faster than a plain one, takes seconds in the C++ compiler for each shape, and cannot
    use the layout of the documents.
    """
    return "no faster on a CPU" if mx.default_device().type == mx.DeviceType.cpu else None
