"""AdamW with bias correction, written out: MLX's own leaves the correction out by default, and torch's does not."""

from __future__ import annotations

import math

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


def one_minus_power(beta: float, step: mx.array) -> mx.array:
    """1 − beta^step in float32, to 2e-7; the subtraction itself would be 2e-5 off in early steps."""
    return -mx.expm1(step * math.log(beta))


def adamw(
    params: Arrays, m: Arrays, v: Arrays, grads: Arrays, *, step: mx.array, lr: float, decay: float
) -> tuple[Arrays, Arrays, Arrays]:
    """(params, m, v) after the `step`-th update, counted from 1. Loshchilov & Hutter, arXiv 1711.05101, algorithm 2."""
    correction1, correction2 = one_minus_power(ADAM_BETA1, step), one_minus_power(ADAM_BETA2, step)
    m = {n: ADAM_BETA1 * m[n] + (1 - ADAM_BETA1) * g for n, g in grads.items()}
    v = {n: ADAM_BETA2 * v[n] + (1 - ADAM_BETA2) * mx.square(g) for n, g in grads.items()}
    denominator = {n: mx.sqrt(v[n]) / mx.sqrt(correction2) + ADAM_EPS for n in v}
    params = {n: w * (1 - lr * decay) - (lr / correction1) * m[n] / denominator[n] for n, w in params.items()}
    return params, m, v
