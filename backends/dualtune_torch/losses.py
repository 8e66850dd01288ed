"""The loss: weighted sum of the targets' negative log-likelihood, in float32 whatever the model computes in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dualtune.backend import IGNORE_INDEX


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
