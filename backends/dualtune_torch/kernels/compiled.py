"""Elementwise code, plain or compiled to one loop: C++ on a CPU, Triton on a GPU.

The plain function is both the reference and the source, so the two cannot diverge. The compiler runs once per
function, not once per shape: all sizes are symbolic on a CPU. On a GPU only the first is, the number of tokens, because
a symbolic width costs a division for each element (the rotary embedding loads 64 numbers instead of 8: counted in the
code that Inductor generates).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch.fx.experimental._config
from torch import Tensor

from dualtune_torch.kernels import allocator

# Sizes that are equal at the first call may differ later.
torch.fx.experimental._config.use_duck_shape = False

RECOMPILE_LIMIT = 64  # of one function
Function = TypeVar("Function", bound=Callable[..., Any])
_plain = ContextVar("plain", default=False)


@cache
def compile_function(function: Function) -> Function:
    """Return the function, compiled at its first call, forward and backward."""
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")  # reuse earlier compilations from disk
    on_cpu, on_gpu = _compiled(function, dynamic=True), _compiled(function, dynamic=None)

    @wraps(function)
    def call(*args: Any) -> Any:
        if is_plain():
            return function(*args)
        tensors = [argument for argument in args if isinstance(argument, Tensor) and argument.dim()]
        if not any(map(_is_on_gpu, tensors)):
            return on_cpu(*args)
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return on_gpu(*args)

    return call  # type: ignore[return-value]


def is_plain() -> bool:
    return _plain.get()


@contextmanager
def plain() -> Iterator[None]:
    """Inside the block, compiled functions run as they are written.

    For generation: with one token of each row, torch takes longer to call a compiled function than the function takes,
    and for a single row it would compile once more.
    """
    before = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(before)


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _compiled(function: Any, dynamic: bool | None) -> Any:
    """Compile with the options that this torch has: the second came with 2.12, the third with 2.13.

    A size of 1 and a dtype are not symbolic: each combination is compiled separately, which takes a second.
    """
    options = {"fullgraph": True, "recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    parameters = inspect.signature(torch.compile).parameters
    if "recompile_limit" not in parameters:
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    compile_: Any = torch.compile  # its overloads lack its newest options
    return compile_(function, dynamic=dynamic, **{name: options[name] for name in options if name in parameters})


def why_not(device: torch.device) -> str | None:
    """Return why nothing can be compiled for this device, or None."""
    try:
        compile_function(_probe)(torch.ones(2, 3, device=device))
    except (RuntimeError, OSError, ImportError) as error:  # no C++ compiler, no headers, no Triton for this GPU
        if allocator.is_out_of_memory(error):
            raise
        return f"torch.compile: {str(error).strip().splitlines()[0]}"
    return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x * x + 1
