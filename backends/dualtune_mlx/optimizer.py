"""AdamW with bias correction, written out: MLX's own leaves the correction out by default, and torch's does not."""

from __future__ import annotations

import mlx.core as mx

from dualtune.backend import ADAM_BETA1, ADAM_BETA2, ADAM_EPS, CLIP_EPS

Arrays = dict[str, mx.array]


def clip(grads: Arrays, max_norm: float | None) -> tuple[Arrays, mx.array]:
    """(gradients scaled to a global L2 norm of at most `max_norm`, the norm before)."""
    norm = mx.sqrt(sum(mx.square(g).sum() for g in grads.values()))
    if max_norm is None:
        return grads, norm
    scale = mx.minimum(1.0, max_norm / (norm + CLIP_EPS))
    return {n: g * scale for n, g in grads.items()}, norm


def adamw(params: Arrays, grads: Arrays, m: Arrays, v: Arrays, *, step: int, lr: float, decay: float) -> None:
    """One update in place, the `step`-th, counted from 1. Loshchilov & Hutter, arXiv 1711.05101, algorithm 2."""
    correction1, correction2 = 1 - ADAM_BETA1**step, 1 - ADAM_BETA2**step
    for n, g in grads.items():
        m[n] = ADAM_BETA1 * m[n] + (1 - ADAM_BETA1) * g
        v[n] = ADAM_BETA2 * v[n] + (1 - ADAM_BETA2) * mx.square(g)
        denominator = mx.sqrt(v[n]) / correction2**0.5 + ADAM_EPS
        params[n] = params[n] * (1 - lr * decay) - (lr / correction1) * m[n] / denominator
