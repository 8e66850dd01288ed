"""Elementwise code, plain or compiled to one loop: C++ on a CPU, Triton on a GPU.

The plain function is both the reference and the source, so the two cannot diverge. Sizes are symbolic (`dynamic`), so
the compiler runs once per function, not once per shape.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.fx.experimental._config

from dualtune_torch.kernels import allocator

# Sizes that are equal at the first call may differ later.
torch.fx.experimental._config.use_duck_shape = False

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def compile_function(function: Function) -> Function:
    """Return the function, compiled at its first call, forward and backward."""
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")  # reuse earlier compilations from disk
    # A size of 1 and a dtype are not symbolic: each combination is compiled separately, which takes a second.
    compile_: Any = torch.compile  # its overloads lack its newest options
    return compile_(function, dynamic=True, fullgraph=True, recompile_limit=64, isolate_recompiles=True)


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
