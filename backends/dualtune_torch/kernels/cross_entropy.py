"""The loss without the logits: the output head and the cross-entropy together, in chunks of target rows.

The logits of a whole micro-batch are the largest tensor of a training step, and most belong to tokens without loss.
Here the rows without a target are left out, and the gradient of each chunk is computed together with its logits, which
are computed once and never kept. A head that is trained gets its gradient in the same pass, added to a float32 total.

The idea is that of Liger's fused linear cross-entropy (Hsu et al., arXiv 2410.10989) and of Wijmans et al., Cut Your
Losses, arXiv 2411.09009.

Legend: M rows with a target, R rows of a chunk, P with padding, D hidden size, V vocabulary, K labels of a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dualtune_torch.beside import Rows
from dualtune_torch.card.memory import LOSS_ROWS
from dualtune_torch.kernels.attention import GRANULE, capped
from dualtune_torch.kernels.products import add_product, linear, times


class Scaling(NamedTuple):
    """What stands between the products of the head and the softmax."""

    cap: float | None = None
    temperature: Tensor | None = None  # float32, a scalar; None: 1

    def of(self, products_RV: Tensor) -> Tensor:
        """Return the logits, float32."""
        x_RV = capped(products_RV.float(), self.cap)
        return x_RV if self.temperature is None else x_RV / self.temperature

    def back(self, slopes_RV: Tensor, x_RV: Tensor) -> Tensor:
        """Return the slopes by the products from those by the logits x, but for 1 / temperature, a factor of all."""
        if self.cap is None:
            return slopes_RV
        capped_RV = x_RV if self.temperature is None else x_RV * self.temperature
        return slopes_RV * (1 - (capped_RV / self.cap).square())


def reference(
    hidden_MD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    labels_M: Tensor,
    scaling: Scaling,
    weights_M: Tensor | None = None,
) -> Tensor:
    """Σ −w·log softmax(scaling of (hidden · headᵀ + bias))[label], softmax and sum in float32; float32 scalar."""
    logits_MV = scaling.of(F.linear(hidden_MD, head_VD, bias_V))
    if weights_M is None:
        return F.cross_entropy(logits_MV, labels_M, reduction="sum")
    return (F.cross_entropy(logits_MV, labels_M, reduction="none") * weights_M).sum()


def logprobs_of_logits(logits_RV: Tensor, labels_R: Tensor, scaling: Scaling) -> Tensor:
    """log p(label) of the chunk's rows, float32 [R], or [R, K] for K labels a row."""
    x_RV = scaling.of(logits_RV)
    if labels_R.ndim == 2:
        return x_RV.gather(-1, labels_R) - x_RV.logsumexp(-1, keepdim=True)
    return x_RV.gather(-1, labels_R[:, None]).squeeze(-1) - x_RV.logsumexp(-1)


def loss_of_logits(logits_RV: Tensor, labels_R: Tensor, scaling: Scaling, weights_R: Tensor | None = None) -> Tensor:
    """The chunk's loss, without a gradient."""
    x_RV = scaling.of(logits_RV)
    losses_R = x_RV.logsumexp(-1) - x_RV.gather(-1, labels_R[:, None]).squeeze(-1)
    return (losses_R if weights_R is None else losses_R * weights_R).sum()


def losses_and_gradient(logits_RV: Tensor, labels_R: Tensor, scaling: Scaling) -> Tensor:
    """Compute the losses of a chunk's rows, [R, 1], and overwrite the logits with their gradient: softmax − one-hot,
    times the slope of the scaling."""
    x_RV = scaling.of(logits_RV)
    x_R1 = x_RV.gather(-1, labels_R[:, None])
    lse_R1 = x_RV.logsumexp(-1, keepdim=True)
    probs_RV, target_R1 = (x_RV - lse_R1).exp(), (x_R1 - lse_R1).exp() - 1
    logits_RV.copy_(scaling.back(probs_RV, x_RV))
    # Cheaper than comparing all elements.
    logits_RV.scatter_(-1, labels_R[:, None], scaling.back(target_R1, x_R1).to(logits_RV.dtype))
    return lse_R1 - x_R1


def losses_and_gradient_in_place(logits_RV: Tensor, labels_R: Tensor, scaling: Scaling) -> Tensor:
    """`losses_and_gradient` for a GPU: comparing all elements costs nothing there, and the last kernel writes over the
    logits. After a scatter the compiler would copy them."""
    x_RV = scaling.of(logits_RV)
    lse_R1 = x_RV.logsumexp(-1, keepdim=True)
    losses_R1 = lse_R1 - x_RV.gather(-1, labels_R[:, None])
    is_label_RV = torch.arange(x_RV.shape[-1], device=x_RV.device) == labels_R[:, None]
    grad_RV = (x_RV - lse_R1).exp() - is_label_RV.float()
    logits_RV.copy_(scaling.back(grad_RV, x_RV))
    return losses_R1


def loss_and_gradient(logits_RV: Tensor, labels_R: Tensor, scaling: Scaling, weights_R: Tensor | None = None) -> Tensor:
    """Compute the chunk's loss, and overwrite the logits with its gradient without the loss weights."""
    losses_R1 = losses_and_gradient(logits_RV, labels_R, scaling)
    return (losses_R1 if weights_R is None else losses_R1 * weights_R[:, None]).sum()


def loss_and_gradient_in_place(
    logits_RV: Tensor, labels_R: Tensor, scaling: Scaling, weights_R: Tensor | None = None
) -> Tensor:
    """`loss_and_gradient` for a GPU."""
    losses_R1 = losses_and_gradient_in_place(logits_RV, labels_R, scaling)
    return (losses_R1 if weights_R is None else losses_R1 * weights_R[:, None]).sum()


def smoothed_loss_and_gradient(
    logits_RV: Tensor, labels_R: Tensor, scaling: Scaling, smoothing: float, weights_R: Tensor | None = None
) -> Tensor:
    """`loss_and_gradient` with `smoothing` as the share of the mean over the vocabulary, of log p as of the slopes."""
    x_RV = scaling.of(logits_RV)
    lse_R1, label_R1 = x_RV.logsumexp(-1, keepdim=True), labels_R[:, None]
    mean_R1 = x_RV.mean(-1, keepdim=True)
    losses_R1 = lse_R1 - (1 - smoothing) * x_RV.gather(-1, label_R1) - smoothing * mean_R1
    grad_RV = (x_RV - lse_R1).exp() - smoothing / x_RV.shape[-1]
    grad_RV = grad_RV.scatter(-1, label_R1, grad_RV.gather(-1, label_R1) - (1 - smoothing))
    logits_RV.copy_(scaling.back(grad_RV, x_RV))
    return (losses_R1 if weights_R is None else losses_R1 * weights_R[:, None]).sum()


# With K labels a row, each has its share of the row's loss weight: the loss is Σ −weight · share · log p(label).


def scales_and_shares(weights_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ|w| of each row, [M], and the weights over it, [M, K]: small weights of a row are no small numbers."""
    scales_M = weights_MK.abs().sum(-1)
    return scales_M, weights_MK / scales_M.where(scales_M > 0, 1.0)[:, None]


def loss_of_several(
    logits_RV: Tensor, labels_RK: Tensor, scaling: Scaling, weights_R: Tensor, shares_RK: Tensor
) -> Tensor:
    """The chunk's loss, without a gradient."""
    return -((logprobs_of_logits(logits_RV, labels_RK, scaling) * shares_RK).sum(-1) * weights_R).sum()


def loss_and_gradient_of_several(
    logits_RV: Tensor, labels_RK: Tensor, scaling: Scaling, weights_R: Tensor, shares_RK: Tensor
) -> Tensor:
    """Compute the chunk's loss, and overwrite the logits with its gradient without the rows' weights."""
    x_RV = scaling.of(logits_RV)
    lse_R1 = x_RV.logsumexp(-1, keepdim=True)
    losses_R = (shares_RK * (lse_R1 - x_RV.gather(-1, labels_RK))).sum(-1)
    grad_RV = (x_RV - lse_R1).exp() * shares_RK.sum(-1, keepdim=True)
    grad_RV = grad_RV.scatter(-1, labels_RK, grad_RV.gather(-1, labels_RK) - shares_RK)  # the labels are distinct
    logits_RV.copy_(scaling.back(grad_RV, x_RV))
    return (losses_R * weights_R).sum()


def target_logprobs(
    hidden_MD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    labels_M: Tensor,
    scaling: Scaling,
    maybe_compile: Callable[[Any], Any],
    rows: Rows | None = None,
) -> Tensor:
    """log softmax(scaling of (hidden · headᵀ + bias))[label], float32 [M] or [M, K], by the products of the loss."""
    logprobs_M = torch.empty(labels_M.shape, device=hidden_MD.device)
    for part in _chunks(hidden_MD):
        hidden_RD, labels_R = hidden_MD[part], labels_M[part]
        logits_PV = _padded_logits(hidden_RD, head_VD, bias_V, rows)
        logprobs_M[part] = maybe_compile(logprobs_of_logits)(logits_PV[: len(labels_R)], labels_R, scaling)
    return logprobs_M


def _chunks(hidden_MD: Tensor) -> Iterator[slice]:
    rows = LOSS_ROWS[hidden_MD.device.type]
    return (slice(start, start + rows) for start in range(0, len(hidden_MD), rows))


def _padded_logits(hidden_RD: Tensor, head_VD: Tensor, bias_V: Tensor | None, rows: Rows | None = None) -> Tensor:
    hidden_PD = F.pad(hidden_RD, (0, 0, 0, -len(hidden_RD) % GRANULE))
    logits_PV = linear(hidden_PD, head_VD, bias_V)
    if rows is not None:
        rows.write_logits(logits_PV, hidden_PD, bias_V)
    return logits_PV


class TargetRows(torch.autograd.Function):
    """The rows with a target, x[where]. No row occurs twice, so the backward pass writes them, and adds nothing up."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, where_M: Tensor) -> Tensor:
        ctx.save_for_backward(where_M)
        ctx.rows = len(x_ND)
        return x_ND.index_select(0, where_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (where_M,) = ctx.saved_tensors
        return grad_MD.new_zeros(ctx.rows, grad_MD.shape[1]).index_copy_(0, where_M, grad_MD), None


class LinearCrossEntropy(torch.autograd.Function):
    """`reference`, with the gradient of `hidden` computed in the forward pass.

    Labels and weights may be [M, K]. The gradient of each row is computed for a loss weight of 1. The backward pass
    multiplies it by the weight and the incoming gradient: float16 cannot represent a small weight, but its product with
    the loss scale.

    `total_VD`: the gradient of a head that is trained, to which the backward pass adds, float32; None: it is frozen.
    Autograd would keep what it adds until the embedding has its gradient too, if the two are one.
    `smoothing`: as in `losses.loss_sum`; an evaluation has none.
    `ids_n`, `rows_nD`: rows that are trained in place of those of a frozen head, float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        labels_M: Tensor,
        scaling: Scaling,
        maybe_compile: Callable[[Any], Any],
        weights_M: Tensor | None = None,
        total_VD: Tensor | None = None,
        smoothing: float = 0.0,
        ids_n: Tensor | None = None,
        rows_nD: Tensor | None = None,
    ) -> Tensor:
        loss = torch.zeros((), device=hidden_MD.device)
        grad_MD = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        grad_VD = None if total_VD is None or grad_MD is None else torch.zeros_like(total_VD)
        own = None if ids_n is None or rows_nD is None else Rows(ids_n, rows_nD)
        grad_nD = None if rows_nD is None or grad_MD is None else torch.zeros_like(rows_nD)
        evaluate = loss_of_logits
        compute = loss_and_gradient_in_place if hidden_MD.is_cuda else loss_and_gradient
        factors = () if weights_M is None else (weights_M,)
        numbers = () if not smoothing else (smoothing,)
        if smoothing:
            compute = smoothed_loss_and_gradient
        if labels_M.ndim == 2:
            evaluate, compute = loss_of_several, loss_and_gradient_of_several
            weights_M, shares_MK = scales_and_shares(
                torch.ones_like(labels_M).float() if weights_M is None else weights_M
            )
            factors = (weights_M, shares_MK)
        for rows in _chunks(hidden_MD):
            labels_R = labels_M[rows]
            R, weights = len(labels_R), [factor[rows] for factor in factors]
            logits_PV = _padded_logits(hidden_MD[rows], head_VD, bias_V, own)
            # Evaluation needs no gradient; in training it takes the place of the logits.
            if grad_MD is None:
                loss += maybe_compile(evaluate)(logits_PV[:R], labels_R, scaling, *weights)
            else:
                loss += maybe_compile(compute)(logits_PV[:R], labels_R, scaling, *numbers, *weights)
                slopes_Pn = own.slopes_of(logits_PV) if own else None
                grad_PD = times(logits_PV, head_VD)
                if slopes_Pn is not None and rows_nD is not None and grad_nD is not None:
                    add_product(grad_PD, slopes_Pn, rows_nD.to(grad_PD.dtype))
                    _add_outer(grad_nD, slopes_Pn[:R], hidden_MD[rows], *weights[:1])
                grad_MD[rows] = grad_PD[:R]
                if grad_VD is not None:
                    _add_outer(grad_VD, logits_PV[:R], hidden_MD[rows], *weights[:1])
            del logits_PV  # before those of the next chunk are made
        ctx.save_for_backward(grad_MD, weights_M, grad_nD)
        ctx.grad_VD, ctx.total_VD, ctx.temperature = grad_VD, total_VD, scaling.temperature
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_MD, weights_M, grad_nD = ctx.saved_tensors
        grad = grad if ctx.temperature is None else grad / ctx.temperature
        slope = grad if weights_M is None else grad * weights_M[:, None]
        if ctx.grad_VD is not None:
            ctx.total_VD.addcmul_(ctx.grad_VD, grad)
            ctx.grad_VD = None
        grad_nD = None if grad_nD is None else grad_nD * grad
        return (grad_MD * slope).to(grad_MD.dtype), *(None,) * 9, grad_nD


class LinearLogprobs(torch.autograd.Function):
    """`target_logprobs` of one label a row and a frozen head, with the gradient of `hidden` computed beside them.

    So the weights of a loss may follow from the log-probabilities, and the logits are computed once all the same.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        labels_M: Tensor,
        scaling: Scaling,
        maybe_compile: Callable[[Any], Any],
    ) -> Tensor:
        logprobs_M, grad_MD = torch.empty(labels_M.shape, device=hidden_MD.device), torch.empty_like(hidden_MD)
        compute = maybe_compile(losses_and_gradient_in_place if hidden_MD.is_cuda else losses_and_gradient)
        for rows in _chunks(hidden_MD):
            labels_R = labels_M[rows]
            logits_PV = _padded_logits(hidden_MD[rows], head_VD, bias_V)
            logprobs_M[rows] = -compute(logits_PV[: len(labels_R)], labels_R, scaling).squeeze(-1)
            grad_MD[rows] = times(logits_PV, head_VD)[: len(labels_R)]
            del logits_PV  # before those of the next chunk are made
        ctx.save_for_backward(grad_MD)
        ctx.temperature = scaling.temperature
        return logprobs_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad_MD,) = ctx.saved_tensors  # that of the loss −log p
        grad_M = grad_M if ctx.temperature is None else grad_M / ctx.temperature
        return (grad_MD * -grad_M[:, None]).to(grad_MD.dtype), None, None, None, None, None


def _add_outer(total_VD: Tensor, slopes_RV: Tensor, hidden_RD: Tensor, weights_R: Tensor | None = None) -> None:
    """Add Σ weight · slopes ⊗ hidden over the rows of a chunk; the products in their dtype, the sum in float32."""
    if weights_R is not None:
        hidden_RD = (hidden_RD * weights_R[:, None]).to(hidden_RD.dtype)
    add_product(total_VD, slopes_RV.T, hidden_RD)
