"""The loss: weighted sum of the targets' negative log-likelihood, in float32 whatever the model computes in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dualtune.engine.backend import IGNORE_INDEX
from dualtune_torch.beside import Rows
from dualtune_torch.card.memory import LOSS_ROWS
from dualtune_torch.kernels.attention import capped


def loss_sum(logits_BTV: Tensor, labels_BT: Tensor, weights_BT: Tensor | None = None) -> Tensor:
    """Σ −w·log p(label) over the labels that are not IGNORE_INDEX; float32 scalar. Without weights, each w is 1."""
    logits_NV, labels_N = logits_BTV.flatten(0, 1).float(), labels_BT.flatten()
    if weights_BT is None:
        return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE_INDEX, reduction="sum")
    losses_N = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses_N * weights_BT.flatten()).sum()


def target_logprobs(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """log p(label), float32 [B, T]; 0 where the label is IGNORE_INDEX."""
    losses_N = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -losses_N.view_as(labels_BT)


def most_probable(
    hidden_MD: Tensor, head_VD: Tensor, bias_V: Tensor | None, cap: float | None, own: Rows | None = None
) -> Tensor:
    """The first index of the largest of capped(hidden · headᵀ + bias), int64 [M]; logits of a few rows at a time."""
    rows = hidden_MD.split(LOSS_ROWS[hidden_MD.device.type])
    found: list[Tensor] = []
    for hidden_RD in rows:
        logits_RV = F.linear(hidden_RD, head_VD, bias_V)
        if own is not None:
            own.write_logits(logits_RV, hidden_RD, bias_V)
        found.append(capped(logits_RV.float(), cap).argmax(-1))
    return torch.cat(found)
