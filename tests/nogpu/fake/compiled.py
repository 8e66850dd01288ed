"""Stand in for the compiler: a compiled function is one launch forward, and one backward.

How many kernels Inductor really makes of each function is counted in tests/nogpu/kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from counter import LaunchCounter
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

counter: LaunchCounter | None = None  # of the work that is done now


class TritonKernel:
    """A Triton kernel that is only counted: what it writes was allocated before."""

    def __init__(self, name: str) -> None:
        self._name = f"triton {name}"

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **options: Any) -> None:
        if counter is not None:
            counter.counts.launches[self._name] += 1


class OneLaunch:
    """A compiled function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = f"compiled {function.__qualname__}"

    def __call__(self, *args: Any) -> Any:
        leaves, spec = tree_flatten(args)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves) and torch.is_grad_enabled():
            return _Differentiable.apply(self._function, self._name, spec, *leaves)
        with _one(self._name):
            return self._function(*args)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], name: str, spec: TreeSpec, *leaves: Any) -> Any:
        ctx.function, ctx.name, ctx.spec = function, name, spec
        ctx.leaves = [leaf.detach().requires_grad_(leaf.requires_grad) if _floats(leaf) else leaf for leaf in leaves]
        with _one(name):
            return function(*tree_unflatten(list(leaves), spec))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with _one(f"{ctx.name}, backward"), torch.enable_grad():
            outputs = tree_leaves(ctx.function(*tree_unflatten(ctx.leaves, ctx.spec)))
            wanted = [leaf for leaf in ctx.leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        of_leaves = [next(found) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in ctx.leaves]
        return None, None, None, *of_leaves


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _one(name: str) -> Any:
    return nullcontext() if counter is None else counter.one_launch(name)
