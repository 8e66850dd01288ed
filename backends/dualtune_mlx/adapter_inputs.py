"""Inputs of adapters that are not kept: the backward pass makes them again from what other operations keep anyway.

The gradient of A needs its input with dropout. That is a norm's output, or `swiglu` of two arrays, whose own backward
passes need only what they were computed from; the dropout mask is a function of the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from dualtune_mlx.kernels.compiled import replace_name

ACTIVATION = "swiglu"  # mlx-lm's name for silu(gate) · up
NORMS = (nn.RMSNorm, nn.LayerNorm)

Make = Callable[..., mx.array]
After = Callable[[mx.array], AbstractContextManager[None]]


class Origins:
    """How the arrays of the current forward pass were made, if it is one whose adapters' inputs are made again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[mx.array, Make, tuple[mx.array, ...]]] | None = None
        self._is_installed = False

    def install(self, model: nn.Module) -> None:
        """Make the norms and activations of a model tell how their results were made. Only classes change."""
        if self._is_installed:
            return
        norms: list[Any] = [module for module in model.modules() if isinstance(module, NORMS)]
        for norm in norms:
            norm.__class__ = _telling(type(norm))
            norm.origins = self
        replace_name(model, ACTIVATION, lambda plain: lambda *inputs: self.made(plain, *inputs))
        self._is_installed = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remember origins, and make inputs again, in what is computed within this context, both passes included."""
        self._known = {}
        try:
            yield
        finally:
            self._known = None

    def made(self, make: Make, *inputs: mx.array) -> mx.array:
        """Return make(*inputs), and remember where it came from."""
        result = make(*inputs)
        if self._known is not None:
            self._known[id(result)] = result, make, inputs
        return result

    def product(self, multiply: Make, x: mx.array, factor: mx.array, after: After) -> mx.array:
        """Return multiply(x, factor), whose backward pass makes x again if that is possible, and its dropout mask.

        `after(array)` makes what is computed within it wait for the array.
        """
        if self._known is None:
            return multiply(x, factor)
        _, make, inputs = self._known.get(id(x), (x, lambda x: x, (x,)))
        product: Any = mx.custom_function(lambda *arrays: multiply(*arrays))

        @product.vjp
        def _(arguments: tuple[mx.array, mx.array], slope: mx.array, _: mx.array) -> list[mx.array]:
            again = make(*mx.depends([*inputs], [slope]))  # else it could be made again long before it is needed
            with after(slope):
                return mx.vjp(multiply, [again, arguments[1]], [slope])[1]

        return product(x, factor)


class TellingNorm:
    """A norm that tells how its result was made."""

    origins: Origins

    def __call__(self, x: mx.array) -> mx.array:
        plain: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]  of the class that this precedes
        return self.origins.made(plain, x)


@cache
def _telling(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (TellingNorm, kind), {})
