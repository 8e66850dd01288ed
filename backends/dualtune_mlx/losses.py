"""The loss: weighted sum of the targets' negative log-likelihood, in float32 whatever the model computes in."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from dualtune.engine.backend import IGNORE_INDEX


def loss_sum(
    logits_BTV: mx.array, labels_BT: mx.array, weights_BT: mx.array | None = None, smoothing: float = 0.0
) -> mx.array:
    """Σ −w·log p(label) over the labels that are not IGNORE_INDEX; float32 scalar. Without weights, each w is 1.

    Labels and weights may be [B, T, K]: see `Batch`. `smoothing`: the share of the mean over the vocabulary in place of
    log p(label); none with K labels.
    """
    losses_BT = _losses(logits_BTV, labels_BT, smoothing)
    return (losses_BT if weights_BT is None else losses_BT * weights_BT).sum()


def target_logprobs(logits_BTV: mx.array, labels_BT: mx.array) -> mx.array:
    """log p(label), float32, of the shape of the labels; 0 where the label is IGNORE_INDEX."""
    return -_losses(logits_BTV, labels_BT)


def _losses(logits_BTV: mx.array, labels_BT: mx.array, smoothing: float = 0.0) -> mx.array:
    is_target_BT = labels_BT != IGNORE_INDEX
    labels_BT = mx.where(is_target_BT, labels_BT, 0)
    if labels_BT.ndim == 3:
        logits_BTV = logits_BTV.astype(mx.float32)
        lse_BT1 = mx.logsumexp(logits_BTV, axis=-1, keepdims=True)
        losses_BT = lse_BT1 - mx.take_along_axis(logits_BTV, labels_BT, axis=-1)
    else:
        losses_BT = nn.losses.cross_entropy(
            logits_BTV.astype(mx.float32), labels_BT, label_smoothing=smoothing, reduction="none"
        )
    return mx.where(is_target_BT, losses_BT, 0.0)
