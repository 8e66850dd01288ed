"""What torch is set to while a micro-batch computes on a GPU that is not there."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def settings() -> dict[str, Any]:
    """Return the settings of this process that decide how numbers are added up."""
    from torch._inductor import config as inductor

    matmul = torch.backends.cuda.matmul
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "inductor_deterministic": inductor.deterministic,
        "fills_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "float32": torch.get_float32_matmul_precision(),
        "tf32_in_convolutions": torch.backends.cudnn.allow_tf32,
        "reduced": [matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction],
        "split_k": matmul.allow_fp16_reduced_precision_reduction_split_k,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


class AtAttention(TorchDispatchMode):
    """Note the settings at the backward pass of attention, which runs in autograd's own thread on a real GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.endswith("_varlen_attn_backward"):
            self.found.append(settings())
        return func(*args, **(kwargs or {}))
