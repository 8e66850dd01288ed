"""The loss: summed negative log-likelihood over the targets, in float32 whatever the model computes in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dualtune.backend import IGNORE_INDEX


def loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Σ −log p(label) over the labels that are not IGNORE_INDEX; float32 scalar."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
