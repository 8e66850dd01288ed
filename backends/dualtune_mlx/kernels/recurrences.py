"""Recurrences in chunks that the backward pass computes again, for training.

mlx-lm walks through a text token by token, and its derivative keeps several tensors of the size of the state for each
token; Jamba's walk (`jamba.py`) writes into one tensor of all states, which it then has once for each token. Here only
the state between two chunks is kept.

Legend: B rows, T tokens, D channels, N numbers of the state of a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.jamba import JambaMambaMixer

CHUNK = 8  # tokens: the state between two is kept, and some forty states for each token of one
Step = Callable[..., tuple[mx.array, mx.array]]


def in_recomputed_chunks(
    step: Step, sequences: Sequence[mx.array], state: mx.array, constants: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    """Return `step(*sequences, state, *constants)`, which is y [B, T, …] and the state after it.

    `sequences` are [B, T, …]. What has a gradient must be an argument of `step`.
    """
    chunk: Any = mx.custom_function(step)

    @chunk.vjp
    def compute_again(primals: list[mx.array], cotangents: list[mx.array], _: Any) -> list[mx.array]:
        _, slopes = mx.vjp(step, mx.depends(primals, cotangents), cotangents)
        # The earlier chunk waits for all slopes of this one, or the tensors of all chunks would wait for them.
        waits = len(sequences)
        others = slopes[:waits] + slopes[waits + 1 :]
        slopes[waits] = mx.depends([slopes[waits]], others)[0]
        return slopes

    outputs: list[mx.array] = []
    # Split and not indexed: the derivative of an index is a tensor of the size of the whole for each part.
    ends = list(range(CHUNK, sequences[0].shape[1], CHUNK))
    for parts in zip(*(mx.split(x, ends, axis=1) for x in sequences), strict=True):
        y, state = chunk(*parts, state, *constants)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), state


def selective_scan(
    x_BTD: mx.array, delta_BTD: mx.array, B_BTN: mx.array, C_BTN: mx.array, A_DN: mx.array, state_BDN: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Return y [B, T, D] and the last state [B, D, N], float32.

    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t and y_t = h_t C_t (Gu and Dao, Mamba, arXiv 2312.00752, algorithm 2).
    """
    sequences = [each.astype(mx.float32) for each in (x_BTD, delta_BTD, B_BTN, C_BTN)]
    if state_BDN is None:
        state_BDN = mx.zeros((x_BTD.shape[0], *A_DN.shape))
    return in_recomputed_chunks(_scan, sequences, state_BDN, [A_DN.astype(mx.float32)])


def _scan(
    x_BTD: mx.array, delta_BTD: mx.array, B_BTN: mx.array, C_BTN: mx.array, state_BDN: mx.array, A_DN: mx.array
) -> tuple[mx.array, mx.array]:
    decays = mx.exp(delta_BTD[..., None] * A_DN)
    states = (delta_BTD * x_BTD)[..., None] * B_BTN[:, :, None]
    # Each token takes up what 1, 2, 4, … tokens before it have: log2(T) steps of all tokens at once.
    shift = 1
    while shift < x_BTD.shape[1]:
        padding = [(0, 0), (shift, 0), (0, 0), (0, 0)]
        states = states + decays * mx.pad(states[:, :-shift], padding)
        decays = decays * mx.pad(decays[:, :-shift], padding, constant_values=1)
        shift *= 2
    states = states + decays * state_BDN[:, None]
    return (states @ C_BTN[..., None]).squeeze(-1), states[:, -1]


class JambaScan:
    """What a JambaMambaMixer computes by chunks."""

    def ssm_step(self: Any, x: mx.array, A: mx.array, state: mx.array | None = None) -> tuple[mx.array, mx.array]:
        delta, B, C = _split(self, x)
        delta, B, C = self.dt_layernorm(delta), self.b_layernorm(B), self.c_layernorm(C)
        return _with_skip(self, x, delta, B, C, A, state)


class MambaScan:
    """What a MambaBlock computes by chunks."""

    # Of a whole text, where mamba.py takes tokens one by one; both classes call their layers by the same names.
    _process_sequence: Any = JambaMambaMixer._process_sequence

    def ssm_step(self: Any, x: mx.array, A: mx.array, state: mx.array | None = None) -> tuple[mx.array, mx.array]:
        delta, B, C = _split(self, x)
        if self.use_bcdt_rms:
            delta, B, C = (mx.fast.rms_norm(each, None, self.args.mixer_rms_eps) for each in (delta, B, C))
        return _with_skip(self, x, delta, B, C, A, state)


class Rwkv7Walk:
    """What an Rwkv7TimeMixing computes by chunks in training, where rwkv7.py takes its kernel on Metal."""

    def _wkv7(
        self: Any, r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: Any
    ) -> Any:
        if not self.training:
            return cast(Any, super())._wkv7(r, w, k, v, a, b, state)
        if state is None:
            state = mx.zeros((r.shape[0], self.num_heads, self.head_dim, self.head_dim), dtype=r.dtype)
        return in_recomputed_chunks(_walk_wkv7, (r, w, k, v, a, b), state, ())


def _walk_wkv7(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    from mlx_lm.models.rwkv7 import _wkv7_step_ops  # pyright: ignore[reportPrivateUsage]

    *sequences, state = arrays
    outputs: list[mx.array] = []
    for t in range(sequences[0].shape[1]):
        y, state = _wkv7_step_ops(*(x[:, t] for x in sequences), state)  # pyright: ignore[reportCallIssue]
        outputs.append(y)
    return mx.stack(outputs, axis=1).astype(sequences[0].dtype), state


def _split(mixer: Any, x: mx.array) -> list[mx.array]:
    rank = mixer.time_step_rank
    return cast(list[mx.array], mx.split(mixer.x_proj(x), [rank, rank + mixer.ssm_state_size], axis=-1))


def _with_skip(
    mixer: Any, x: mx.array, delta: mx.array, B: mx.array, C: mx.array, A: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    y, state = selective_scan(x, nn.softplus(mixer.dt_proj(delta)), B, C, A, state)
    return y.astype(x.dtype) + mixer.D * x, state


# By the names of mlx-lm's classes: a start need not import each family of models.
WITHOUT_DERIVATIVE: dict[str, type] = {"Rwkv7TimeMixing": Rwkv7Walk}  # what mlx-lm's own code computes on Metal
SCANS: dict[str, type] = {"JambaMambaMixer": JambaScan, "MambaBlock": MambaScan} | WITHOUT_DERIVATIVE


def install(model: nn.Module, scans: Mapping[str, type] = SCANS) -> bool:
    """Make the recurrences of a model compute in chunks. Returns whether it has any."""
    classes: dict[type, type] = {}
    for module in cast(list[nn.Module], model.modules()):
        kind = type(module)  # may be derived from mlx-lm's
        scan = next((scans[base.__name__] for base in kind.__mro__ if base.__name__ in scans), None)
        if scan is not None:
            module.__class__ = classes.setdefault(kind, type(kind.__name__, (scan, kind), {}))
    return bool(classes)
