"""Attention without a dense mask: each document separately, and long ones in chunks of queries.

mlx-lm's modules call `scaled_dot_product_attention`, a name in their own file, with the mask of whole rows. In
one model that name becomes an `Attention`. The plain version is the original function.

Legend: B rows, T tokens of a row, H heads, d head size, C queries of a chunk, K keys that they may see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn

from dualtune_mlx.card.memory import ATTENTION_CHUNK
from dualtune_mlx.kernels.compiled import replace_name
from dualtune_mlx.packing import PackedRows

NAME = "scaled_dot_product_attention"

Pieces = list[tuple[int, bool]]


def pieces_of(segments_BT: np.ndarray) -> Pieces:
    """Return the runs of equal segments over all rows: (tokens, whether it is a document and not padding)."""
    B, T = segments_BT.shape
    starts_BT = np.diff(segments_BT, axis=1, prepend=-1) != 0
    starts = np.append(np.flatnonzero(starts_BT), B * T)
    return [(int(stop - start), bool(segments_BT.flat[start])) for start, stop in pairwise(starts)]


def reach_of(pieces: Pieces, chunk: int = ATTENTION_CHUNK) -> int:
    """Return how many tokens before it a token of these documents may see, rounded up to a power of two of chunks."""
    longest = max((length for length, is_document in pieces if is_document), default=1)
    return chunk << max(0, -(-longest // chunk) - 1).bit_length()


class Attention:
    """Replaces mlx-lm's `scaled_dot_product_attention` in a model.

    `pieces` are the documents of the current micro-batch. They are not set in compiled code, which would be recompiled
    for each layout of documents. Without them, rows longer than a chunk are computed in chunks, of packed rows with the
    keys within `reach` alone, for each of whose few values code is compiled.
    """

    def __init__(self) -> None:
        self.pieces: Pieces | None = None
        self.reach: int | None = None

    def replaces(self, plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Return the function to call instead of `plain`. It calls `plain` for windows, sinks, and generation with a
        cache."""

        def attend(
            queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, **options: Any
        ) -> mx.array:
            packed = isinstance(cache, PackedRows)
            whole = mask is cache.make_mask(mask.shape[-1]) if packed else isinstance(mask, str) and mask == "causal"
            B, _, T, _ = queries.shape
            if whole and not options and keys.shape[2] == T:
                if self.pieces is not None and sum(length for length, _ in self.pieces) == B * T:
                    return by_document(queries, keys, values, scale, self.pieces)
                if T > ATTENTION_CHUNK:
                    segments_BT, reach = (cache.segments_BT, self.reach) if packed else (None, None)
                    return chunked(queries, keys, values, scale, segments_BT, reach=reach)
            return plain(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)

        return attend


def install(model: nn.Module, attention: Attention) -> int:
    """Make a model use `attention`. Returns how many of its modules do."""
    return replace_name(model, NAME, attention.replaces)


def by_document(q_BHTd: mx.array, k_BHTd: mx.array, v_BHTd: mx.array, scale: float, pieces: Pieces) -> mx.array:
    """Causal attention inside each piece of the rows; zero for padding."""
    B, H, T, _ = q_BHTd.shape
    cuts = np.cumsum([length for length, _ in pieces])[:-1].tolist()
    parts = zip(*(mx.split(_in_one_row(x), cuts, axis=2) for x in (q_BHTd, k_BHTd, v_BHTd)), strict=True)
    attended = [
        chunked(q, k, v, scale) if is_document else mx.zeros((1, H, length, v.shape[-1]), q.dtype)
        for (length, is_document), (q, k, v) in zip(pieces, parts, strict=True)
    ]
    return mx.concatenate(attended, axis=2).reshape(H, B, T, -1).swapaxes(0, 1)


def _in_one_row(x_BHTd: mx.array) -> mx.array:
    B, H, T, d = x_BHTd.shape
    return x_BHTd.swapaxes(0, 1).reshape(1, H, B * T, d)


def chunked(
    q_BHTd: mx.array, k_BHTd: mx.array, v_BHTd: mx.array, scale: float, segments_BT: mx.array | None = None,
    *, chunk: int = ATTENTION_CHUNK, reach: int | None = None,
) -> mx.array:  # fmt: skip
    """Causal attention, inside segments if they are given, with the scores of one chunk of queries at a time.

    Keys after the chunk are skipped, which halves the work of a long row, and so are those more than `reach` tokens
    before it, if no segment that matters is longer. The backward pass recomputes the scores, so O(C · K) of them are in
    memory instead of O(T²): Rabe & Staats, Self-attention Does Not Need O(n²) Memory, arXiv 2112.05682.
    """
    T = q_BHTd.shape[2]
    chunks = [Chunk(0 if reach is None else max(0, i - reach), i, min(i + chunk, T)) for i in range(0, T, chunk)]
    if len(chunks) == 1:
        return _attend(q_BHTd, k_BHTd, v_BHTd, scale=scale, segments_BT=segments_BT, part=chunks[0])

    @mx.custom_function
    def all_chunks(q_BHTd: mx.array, k_BHTd: mx.array, v_BHTd: mx.array) -> mx.array:
        attended: list[mx.array] = []
        for part in chunks:
            inputs = _after(attended[-1:], part.of(q_BHTd, k_BHTd, v_BHTd))
            attended.append(_attend(*inputs, scale=scale, segments_BT=segments_BT, part=part))
        return mx.concatenate(attended, axis=2)

    @all_chunks.vjp
    def _(primals: tuple[mx.array, ...], slope_BHTd: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        q_BHTd, k_BHTd, v_BHTd = primals
        dq_parts: list[mx.array] = []
        dk_BHTd, dv_BHTd = (mx.zeros(x.shape, mx.float32) for x in (k_BHTd, v_BHTd))
        for part in chunks:
            attend = partial(_attend, scale=scale, segments_BT=segments_BT, part=part)
            inputs = _after([*dq_parts[-1:], dk_BHTd, dv_BHTd], part.of(q_BHTd, k_BHTd, v_BHTd))
            dq, dk, dv = mx.vjp(attend, inputs, [slope_BHTd[:, :, part.start : part.stop]])[1]
            dq_parts.append(dq)
            around = [(0, 0), (0, 0), (part.first_key, T - part.stop), (0, 0)]
            dk_BHTd, dv_BHTd = dk_BHTd + mx.pad(dk, around), dv_BHTd + mx.pad(dv, around)
        return mx.concatenate(dq_parts, axis=2), dk_BHTd.astype(k_BHTd.dtype), dv_BHTd.astype(v_BHTd.dtype)

    return cast(mx.array, all_chunks(q_BHTd, k_BHTd, v_BHTd))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of queries [start, stop), which see keys from `first_key` on."""

    first_key: int
    start: int
    stop: int

    def of(self, q_BHTd: mx.array, k_BHTd: mx.array, v_BHTd: mx.array) -> list[mx.array]:
        """Return the queries, and the keys and values that they may see."""
        keys = slice(self.first_key, self.stop)
        return [q_BHTd[:, :, self.start : self.stop], k_BHTd[:, :, keys], v_BHTd[:, :, keys]]


def _attend(
    q_BHCd: mx.array, k_BHKd: mx.array, v_BHKd: mx.array, *, scale: float, segments_BT: mx.array | None, part: Chunk
) -> mx.array:
    mask = "causal" if segments_BT is None else _mask(segments_BT, part)
    return mx.fast.scaled_dot_product_attention(q_BHCd, k_BHKd, v_BHKd, scale=scale, mask=mask)


def _after(results: list[mx.array], inputs: list[mx.array]) -> list[mx.array]:
    """Make the inputs depend on the results: else MLX might hold the scores of all chunks at once."""
    return mx.depends(inputs, results) if results else inputs


def _mask(segments_BT: mx.array, part: Chunk) -> mx.array:
    """Which of its K keys each of the C queries of a chunk sees: bool [B, 1, C, K]."""
    queries, keys = slice(part.start, part.stop), slice(part.first_key, part.stop)
    is_same_BCK = segments_BT[:, queries, None] == segments_BT[:, None, keys]
    is_before_CK = mx.arange(part.start, part.stop)[:, None] >= mx.arange(part.first_key, part.stop)
    return (is_same_BCK & is_before_CK)[:, None]


# ----------------------------------------------------------------------------------------------------------------------
# `dualtune bench attention` on MLX: `chunked` beside MLX's function, as mlx-lm calls it, and plain products.


def attention_works(T: int, H: int, G: int, d: int, dtype: mx.Dtype) -> dict[str, Callable[[], list[mx.array]]]:
    """Return forward and backward passes of one document of T tokens, by name: see `dualtune.doctor.bench.attention`.

    The gradient is that of the sum of output · fixed numbers.
    """
    shapes = ((1, H, T, d), (1, G, T, d), (1, G, T, d), (1, H, T, d))
    q, k, v, dout = (mx.random.normal(s, key=mx.random.key(i)).astype(dtype) for i, s in enumerate(shapes))
    mx.eval(q, k, v, dout)
    scale = d**-0.5

    def eager(q_BHTd: mx.array, k_BGTd: mx.array, v_BGTd: mx.array) -> mx.array:
        k_BHTd, v_BHTd = (mx.repeat(x, H // G, axis=1) for x in (k_BGTd, v_BGTd))
        seen_TT = mx.arange(T)[:, None] >= mx.arange(T)
        scores_BHTT = mx.where(seen_TT, (q_BHTd @ k_BHTd.swapaxes(-1, -2)) * scale, -mx.inf)
        return mx.softmax(scores_BHTT, axis=-1, precise=True).astype(dtype) @ v_BHTd

    functions: dict[str, Callable[..., mx.array]] = {
        "ours": partial(chunked, scale=scale),
        "sdpa": partial(mx.fast.scaled_dot_product_attention, scale=scale, mask="causal"),
        "eager": eager,
    }

    def work(function: Callable[..., mx.array]) -> list[mx.array]:
        (out,), grads = mx.vjp(function, [q, k, v], [dout])
        mx.eval(out, grads)
        return [out, *grads]

    return {name: partial(work, function) for name, function in functions.items()}
