"""Functions that mlx-lm's modules call by a name in their own file, replaced for the modules of one model.

These get a copy of their `__call__` in which the name is another function. mlx-lm's files, and other models in the
process, do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from mlx import nn

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
