"""Matrix products that are added to a total of higher precision."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(total_IO: Tensor, a_IK: Tensor, b_KO: Tensor, factor: float = 1.0) -> None:
    """total += factor · a b: one kernel on a GPU, where the sum in the total's float32 is rounded once.

    On a CPU, products of 16-bit numbers are rounded to 16 bits before they are added.
    """
    if a_IK.dtype == total_IO.dtype:
        total_IO.addmm_(a_IK, b_KO, alpha=factor)
    elif total_IO.is_cuda:
        torch.addmm(total_IO, a_IK, b_KO, out_dtype=total_IO.dtype, alpha=factor, out=total_IO)
    else:
        total_IO.add_(a_IK @ b_KO, alpha=factor)
