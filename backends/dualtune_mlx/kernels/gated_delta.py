"""The gated delta rule in chunks, for training: mlx-lm's differentiable form walks through the text token by token.

S_t = g_t S_{t-1} (I - beta_t k_t k_tT) + beta_t v_t k_tT and y_t = S_t q_t (Yang et al., Gated Delta Networks, arXiv
2412.06464, section 3.3). Within a chunk the updates u of its tokens solve a triangular system (the UT transform), so a
chunk costs a few matrix products, and only its first state is kept for the backward pass instead of every token's.

Legend: B rows, T tokens, K key and H value heads, d size of keys, e size of values; N chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn

from dualtune_mlx.kernels.compiled import replace_name
from dualtune_mlx.kernels.recurrences import in_recomputed_chunks

NAME = "gated_delta_update"  # mlx-lm's function, in the files of its models
CHUNK = 64  # tokens; a power of two


def install(model: nn.Module) -> bool:
    """Make the layers of a model compute by chunks. Returns whether it has any."""
    return replace_name(model, NAME, in_chunks) > 0


def in_chunks(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return mlx-lm's function `plain`, by chunks where it begins a text and has one decay for each head.

    In training its walk through another text is computed by chunks too, which the backward pass computes again.
    """

    def update(
        q_BTKd: mx.array, k_BTKd: mx.array, v_BTHe: mx.array, a: mx.array, b_BTH: mx.array, A_log: mx.array,
        dt_bias: mx.array, state: mx.array | None = None, mask: mx.array | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        begins = state is None and mask is None and q_BTKd.shape[1] > 1
        if begins and a.ndim == 3 and options.get("lower_bound") is None:
            beta_BTH = mx.sigmoid(b_BTH.astype(mx.float32)) * (2.0 if options.get("allow_neg_eigval") else 1.0)
            softplus_BTH = mx.logaddexp((a + dt_bias).astype(mx.float32), mx.array(0.0))
            y, state = gated_delta(q_BTKd, k_BTKd, v_BTHe, -mx.exp(A_log.astype(mx.float32)) * softplus_BTH, beta_BTH)
            return y.astype(v_BTHe.dtype), state
        if mask is not None or options.get("use_kernel", True):
            return plain(q_BTKd, k_BTKd, v_BTHe, a, b_BTH, A_log, dt_bias, state, mask, **options)
        if state is None:
            state = mx.zeros((v_BTHe.shape[0], *v_BTHe.shape[2:], q_BTKd.shape[-1]))
        return in_recomputed_chunks(
            partial(_walk, plain, options), (q_BTKd, k_BTKd, v_BTHe, a, b_BTH), state, (A_log, dt_bias)
        )

    return update


def _walk(plain: Callable[..., Any], options: dict[str, Any], *arrays: mx.array) -> tuple[mx.array, mx.array]:
    *inputs, state, A_log, dt_bias = arrays
    return plain(*inputs, A_log, dt_bias, state, None, **options)


def gated_delta(
    q_BTKd: mx.array, k_BTKd: mx.array, v_BTHe: mx.array, log_g_BTH: mx.array, beta_BTH: mx.array
) -> tuple[mx.array, mx.array]:
    """Return y [B, T, H, e] and the state after the text [B, H, e, d], float32. The first state is zero."""
    T, repeats = q_BTKd.shape[1], v_BTHe.shape[2] // q_BTKd.shape[2]
    C = min(CHUNK, 1 << (T - 1).bit_length())
    q, k, v = (
        _chunks(x.astype(mx.float32), C) for x in (_repeated(q_BTKd, repeats), _repeated(k_BTKd, repeats), v_BTHe)
    )  # [B, H, N, C, …]; padding has keys, updates and log-decays of zero
    log_g, beta = _chunks(log_g_BTH[..., None], C), _chunks(beta_BTH[..., None], C)
    sums = mx.cumsum(log_g, axis=-2)
    earlier, seen = mx.tri(C, C, -1).astype(mx.bool_), mx.tri(C, C).astype(mx.bool_)
    decay = mx.exp(mx.where(seen, sums - sums.swapaxes(-1, -2), -mx.inf))  # from token j to token i of a chunk
    kT, weighted = k.swapaxes(-1, -2), beta * k
    inverse = _unit_inverse(mx.where(earlier, weighted @ kT * decay, 0.0))
    u, w = inverse @ (beta * v), inverse @ (weighted * mx.exp(sums))
    reads, last = mx.where(seen, q @ kT * decay, 0.0), sums[..., -1:, :]
    q, k = q * mx.exp(sums), k * mx.exp(last - sums)
    state = mx.zeros((*v.shape[:2], k.shape[-1], v.shape[-1]))  # [B, H, d, e]
    outputs: list[mx.array] = []
    for n in range(v.shape[2]):
        new = u[:, :, n] - w[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + reads[:, :, n] @ new)
        state = state * mx.exp(last[:, :, n]) + k[:, :, n].swapaxes(-1, -2) @ new
    y_BTHe = mx.concatenate(outputs, axis=2)[:, :, :T].swapaxes(1, 2)
    return y_BTHe, state.swapaxes(-1, -2)


def _repeated(x: mx.array, repeats: int) -> mx.array:
    return x if repeats == 1 else mx.repeat(x, repeats, axis=2)


def _chunks(x_BTHx: mx.array, C: int) -> mx.array:
    B, T, H, size = x_BTHx.shape
    padded = mx.pad(x_BTHx.swapaxes(1, 2), [(0, 0), (0, 0), (0, -T % C), (0, 0)])
    return padded.reshape(B, H, -1, C, size)


def _unit_inverse(lower: mx.array) -> mx.array:
    """Return (I + L)^-1 for a strictly lower triangular L [..., C, C], C a power of two, as stable as substitution.

    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]: diagonal blocks of 1, 2, 4, … are inverted together.
    """
    C = lower.shape[-1]
    blocks = mx.broadcast_to(mx.array(1.0), (*lower.shape[:-1], 1))[..., None]  # [..., C / size, size, size]
    size = 1
    while size < C:
        pairs = C // (2 * size)
        whole = lower.reshape(*lower.shape[:-2], pairs, 2, size, pairs, 2, size)
        own = mx.stack([whole[..., p, 1, :, p, 0, :] for p in range(pairs)], axis=-3)
        halves = blocks.reshape(*blocks.shape[:-3], pairs, 2, size, size)
        first, second = halves[..., 0, :, :], halves[..., 1, :, :]
        upper = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        below = mx.concatenate([-(second @ own @ first), second], axis=-1)
        blocks, size = mx.concatenate([upper, below], axis=-2), 2 * size
    return blocks[..., 0, :, :]
