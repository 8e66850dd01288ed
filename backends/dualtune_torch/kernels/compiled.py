"""Elementwise code, as it is written or compiled to one loop: C++ on a CPU, Triton on a GPU.

The plain function is the reference and the source at once, so there is nothing to keep in step. Sizes are symbols to
the compiler (`dynamic`): it runs once for a function, not once for a shape.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.fx.experimental._config

# Sizes that happen to be equal at the first call are not always so.
torch.fx.experimental._config.use_duck_shape = False

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def fuse(function: Function) -> Function:
    """The function, compiled at its first call, forward and backward."""
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")  # what was compiled once is read from disk
    # A size of 1 is no symbol to the compiler, nor is a dtype: each combination is another compilation, of a second.
    compile_: Any = torch.compile  # whose overloads lack its newest options
    return compile_(function, dynamic=True, fullgraph=True, recompile_limit=64, isolate_recompiles=True)


def why_not(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device, or None."""
    try:
        fuse(_probe)(torch.ones(2, 3, device=device))
    except (RuntimeError, OSError, ImportError) as error:  # no C++ compiler, no headers, no Triton for this GPU
        return f"torch.compile: {str(error).strip().splitlines()[0]}"
    return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x * x + 1
