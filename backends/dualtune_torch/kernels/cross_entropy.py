"""The loss without the logits: the output head and the cross-entropy together, in chunks of target rows.

Logits of a whole micro-batch are the largest tensor of a training step, mostly computed for tokens that nobody learns.
Here the rows without a target are left out, and each chunk's gradient is made while its logits are at hand, so that
they are computed once and kept nowhere. The head is frozen: its own gradient is never formed.

The idea is that of Liger's fused linear cross-entropy (Hsu et al., arXiv 2410.10989) and of Wijmans et al., Cut Your
Losses, arXiv 2411.09009.

Legend: M rows with a target, R rows of a chunk, P with padding, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dualtune_torch.kernels.attention import GRANULE, capped
from dualtune_torch.sizes import LOSS_ROWS


def reference(
    hidden_MD: Tensor, head_VD: Tensor, bias_V: Tensor | None, labels_M: Tensor, cap: float | None = None
) -> Tensor:
    """Σ −log softmax(capped(hidden · headᵀ + bias))[label], softmax and sum in float32; float32 scalar."""
    logits_MV = capped(F.linear(hidden_MD, head_VD, bias_V).float(), cap)
    return F.cross_entropy(logits_MV, labels_M, reduction="sum")


def loss_of_logits(logits_RV: Tensor, labels_R: Tensor, cap: float | None) -> Tensor:
    """The chunk's loss, without a gradient."""
    x_RV = capped(logits_RV.float(), cap)
    return (x_RV.logsumexp(-1) - x_RV.gather(-1, labels_R[:, None]).squeeze(-1)).sum()


def loss_and_gradient(logits_RV: Tensor, labels_R: Tensor, cap: float | None) -> Tensor:
    """The chunk's loss. The logits are overwritten by its gradient, softmax − one-hot, times the slope of the cap."""
    x_RV = capped(logits_RV.float(), cap)
    x_R1 = x_RV.gather(-1, labels_R[:, None])
    lse_R1 = x_RV.logsumexp(-1, keepdim=True)
    probs_RV, target_R1 = (x_RV - lse_R1).exp(), (x_R1 - lse_R1).exp() - 1
    if cap is not None:
        probs_RV, target_R1 = (g * (1 - (x / cap).square()) for g, x in ((probs_RV, x_RV), (target_R1, x_R1)))
    logits_RV.copy_(probs_RV)
    logits_RV.scatter_(-1, labels_R[:, None], target_R1.to(logits_RV.dtype))  # cheaper than to look at every element
    return (lse_R1 - x_R1).sum()


class LinearCrossEntropy(torch.autograd.Function):
    """`reference`, with its gradient by `hidden` made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        labels_M: Tensor,
        cap: float | None,
        fuse: Callable[[Any], Any],
    ) -> Tensor:
        rows = LOSS_ROWS[hidden_MD.device.type]
        loss = torch.zeros((), device=hidden_MD.device)
        grad_MD = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        for start in range(0, len(labels_M), rows):
            hidden_RD, labels_R = hidden_MD[start : start + rows], labels_M[start : start + rows]
            R = len(labels_R)
            logits_PV = F.linear(F.pad(hidden_RD, (0, 0, 0, -R % GRANULE)), head_VD, bias_V)
            if grad_MD is None:
                loss += fuse(loss_of_logits)(logits_PV[:R], labels_R, cap)
            else:
                loss += fuse(loss_and_gradient)(logits_PV[:R], labels_R, cap)
                grad_MD[start : start + R] = (logits_PV @ head_VD)[:R]
        ctx.save_for_backward(grad_MD)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad_MD,) = ctx.saved_tensors
        return (grad_MD * grad).to(grad_MD.dtype), None, None, None, None, None
