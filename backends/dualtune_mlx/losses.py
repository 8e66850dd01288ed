"""The loss: summed negative log-likelihood over the targets, in float32 whatever the model computes in."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from dualtune.backend import IGNORE_INDEX


def loss_sum(logits_BTV: mx.array, labels_BT: mx.array) -> mx.array:
    """Σ −log p(label) over the labels that are not IGNORE_INDEX; float32 scalar."""
    is_target_BT = labels_BT != IGNORE_INDEX
    labels_BT = mx.where(is_target_BT, labels_BT, 0)
    losses_BT = nn.losses.cross_entropy(logits_BTV.astype(mx.float32), labels_BT, reduction="none")
    return mx.where(is_target_BT, losses_BT, 0.0).sum()
