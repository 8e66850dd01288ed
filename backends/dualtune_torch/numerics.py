"""How torch adds numbers up while an engine computes: in float32, and in a fixed order if that was asked for.

The settings belong to the process, which may be somebody else's program, so they hold only inside the engine's calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

Context = Callable[[], AbstractContextManager[None]]
WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")  # what torch accepts for cuBLAS in a fixed order


@contextmanager
def exact() -> Iterator[None]:
    """Multiply float32 in float32, and add parts of 16-bit products in float32.

    torch lets cuBLAS add the parts of a product in its own 16 bits, if it has split the inner dimension. The gradient
    of A and B is such a product: few rows and columns, and an inner dimension of all tokens.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    reductions = [f"allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")]
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)) for name in reductions}
    precision, of_convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        for name in reductions:
            setattr(matmul, name, False)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32 = of_convolutions
        for name, (allowed, split) in before.items():
            setattr(matmul, name, allowed if split else (allowed, split))


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch choose operators that give the same bits each time, and refuse those that it does not have.

    The backward pass of FlashAttention adds in a fixed order, and Inductor times no reductions. cuBLAS gets a workspace
    of fixed size, by an environment variable that it reads once and that therefore stays. The backward pass of a GPU
    runs in this thread, because Inductor's settings hold only in the thread that made them.
    """
    import torch._inductor.config as inductor

    memory: Any = torch.utils.deterministic
    if os.environ.get(WORKSPACE) not in FIXED:
        os.environ[WORKSPACE] = FIXED[0]
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    of_inductor, fills = inductor.deterministic, memory.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # the engine reads no memory that it has not written
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
        inductor.deterministic, memory.fill_uninitialized_memory = of_inductor, fills


def together(*contexts: Context) -> Context:
    """Return all of these contexts as one."""

    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return all_of_them


def use_fixed_experts(model: PreTrainedModel) -> None:
    """Let experts compute one after another: their grouped product counts its rows by `histc`, which torch refuses."""
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")
