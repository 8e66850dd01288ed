"""The loss: weighted sum of the targets' negative log-likelihood, in float32 whatever the model computes in."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dualtune.engine.backend import IGNORE_INDEX
from dualtune_torch.beside import Rows
from dualtune_torch.card.memory import LOSS_ROWS
from dualtune_torch.kernels.cross_entropy import Scaling
from dualtune_torch.kernels.products import linear


def loss_sum(logits_BTV: Tensor, labels_BT: Tensor, weights_BT: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """Σ −w·log p(label) over the labels that are not IGNORE_INDEX; float32 scalar. Without weights, each w is 1.

    Labels and weights may be [B, T, K]: see `Batch`. `smoothing`: the share of the mean over the vocabulary in place of
    log p(label); none with K labels.
    """
    if labels_BT.ndim == 3:
        logprobs_BTK = target_logprobs(logits_BTV, labels_BT)
        return -(logprobs_BTK if weights_BT is None else logprobs_BTK * weights_BT).sum()
    logits_NV, labels_N = logits_BTV.flatten(0, 1).float(), labels_BT.flatten()
    how = {"ignore_index": IGNORE_INDEX, "label_smoothing": smoothing}
    if weights_BT is None:
        return F.cross_entropy(logits_NV, labels_N, reduction="sum", **how)
    return (F.cross_entropy(logits_NV, labels_N, reduction="none", **how) * weights_BT.flatten()).sum()


def target_logprobs(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """log p(label), float32, of the shape of the labels; 0 where the label is IGNORE_INDEX."""
    if labels_BT.ndim == 3:
        logprobs_BTK = logits_BTV.float().log_softmax(-1).gather(-1, labels_BT.clamp(min=0))
        return logprobs_BTK.where(labels_BT != IGNORE_INDEX, 0.0)
    losses_N = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -losses_N.view_as(labels_BT)


def by_rows(
    function: Callable[[Tensor], Tensor],
    hidden_MD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    scaling: Scaling,
    own: Rows | None = None,
) -> Tensor:
    """function(scaling of (hidden · headᵀ + bias)) of float32 logits, [M, …]; the logits of a few rows at a time.

    `own`: rows of the head that are trained.
    """
    values: list[Tensor] = []
    for hidden_RD in hidden_MD.split(LOSS_ROWS[hidden_MD.device.type]):
        logits_RV = linear(hidden_RD, head_VD, bias_V)
        if own is not None:
            own.write_logits(logits_RV, hidden_RD, bias_V)
        values.append(function(scaling.of(logits_RV)))
    return torch.cat(values)


def top_of_logits(logits_RV: Tensor, k: int) -> Tensor:
    """log p of the k most probable tokens, and these, float64 [R, 2, k]: one array, so that the host waits once."""
    values_Rk, tokens_Rk = logits_RV.topk(k)
    return torch.stack([(values_Rk - logits_RV.logsumexp(-1, keepdim=True)).double(), tokens_Rk.double()], 1)
