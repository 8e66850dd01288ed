"""Pieces of the mathematics of LoRA layers for which a kernel may stand in, and the plain code of the shared ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoRAPieces:
    """What the kernels of a LoRA group do for it; arguments and results are those of the plain code beside each."""

    down: Callable[..., Tensor] | None = None  # these three come together: the mask in registers
    add_dx: Callable[..., None] | None = None
    add_dA: Callable[..., None] | None = None
    back_g: Callable[..., None] | None = None


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


def back_g(g_MO: Tensor, B_Or: Tensor, u_Mr: Tensor, scale: float, v_Mr: Tensor, dB_Or: Tensor) -> None:
    """Write v = s · g B, and add s · gᵀ u to dB."""
    v_Mr.addmm_(g_MO, B_Or, beta=0, alpha=scale)
    add_product(dB_Or, g_MO.T, u_Mr, scale)
