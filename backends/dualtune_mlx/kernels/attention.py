"""Attention without a dense mask: each document separately, and long ones in chunks of queries.

A document that shares the beginning of another one (`Batch.parents_BT`) has the keys of this beginning before its own.

mlx-lm's modules call `scaled_dot_product_attention`, a name in their own file, with the mask of whole rows. In
one model that name becomes an `Attention`. The plain version is the original function.

Legend: B rows, T tokens of a row, H heads, d head size, C queries of a chunk, K keys that they may see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx import nn

from dualtune.engine.backend import Batch
from dualtune.engine.documents import branches_of
from dualtune_mlx.card.memory import ATTENTION_CHUNK
from dualtune_mlx.kernels.compiled import replace_name
from dualtune_mlx.packing import PackedRows

NAME = "scaled_dot_product_attention"


class DocumentPiece(NamedTuple):
    """A run of tokens of one segment, in the concatenated rows."""

    start: int
    length: int
    is_document: bool  # and not padding
    origin: int = 0  # the first token of the document whose beginning it shares
    shared: int = 0  # tokens; 0: there is no such document


Pieces = list[DocumentPiece]


def pieces_of(batch: Batch) -> Pieces:
    """Return the pieces of a micro-batch, over all rows."""
    B, T = batch.segments_BT.shape
    starts_BT = np.diff(batch.segments_BT, axis=1, prepend=-1) != 0
    starts = np.append(np.flatnonzero(starts_BT), B * T).tolist()
    origins = {b.row * T + b.start: (b.row * T + b.origin, b.shared) for b in branches_of(batch)}
    return [
        DocumentPiece(start, stop - start, bool(batch.segments_BT.flat[start]), *origins.get(start, ()))
        for start, stop in pairwise(starts)
    ]


def reach_of(pieces: Pieces, chunk: int = ATTENTION_CHUNK) -> int:
    """Return how many tokens before it a token of these documents may see, rounded up to a power of two of chunks."""
    ends = ((piece, piece.start + piece.length) for piece in pieces if piece.is_document)
    longest = max((end - (piece.origin if piece.shared else piece.start) for piece, end in ends), default=1)
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
                if self.pieces is not None and sum(piece.length for piece in self.pieces) == B * T:
                    return by_document(queries, keys, values, scale, self.pieces)
                if T > ATTENTION_CHUNK:
                    rows, reach = (cache, self.reach) if packed else (None, None)
                    return chunked(queries, keys, values, scale, rows, reach=reach)
            return plain(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)

        return attend


def install(model: nn.Module, attention: Attention) -> int:
    """Make a model use `attention`. Returns how many of its modules do."""
    return replace_name(model, NAME, attention.replaces)


def by_document(q_BHTd: mx.array, k_BHTd: mx.array, v_BHTd: mx.array, scale: float, pieces: Pieces) -> mx.array:
    """Causal attention inside each piece of the rows; zero for padding."""
    B, H, T, _ = q_BHTd.shape
    cuts = [piece.start for piece in pieces[1:]]
    parts = zip(*(mx.split(_in_one_row(x), cuts, axis=2) for x in (q_BHTd, k_BHTd, v_BHTd)), strict=True)
    whole_1HNd = [_in_one_row(x) for x in (k_BHTd, v_BHTd)] if any(piece.shared for piece in pieces) else []
    attended: list[mx.array] = []
    for piece, (q, *own) in zip(pieces, parts, strict=True):
        if piece.shared:
            beginning = slice(piece.origin, piece.origin + piece.shared)
            own = [mx.concatenate([x[:, :, beginning], y], axis=2) for x, y in zip(whole_1HNd, own, strict=True)]
        k, v = own
        empty = (1, H, piece.length, v.shape[-1])
        attended.append(chunked(q, k, v, scale) if piece.is_document else mx.zeros(empty, q.dtype))
    return mx.concatenate(attended, axis=2).reshape(H, B, T, -1).swapaxes(0, 1)


def _in_one_row(x_BHTd: mx.array) -> mx.array:
    B, H, T, d = x_BHTd.shape
    return x_BHTd.swapaxes(0, 1).reshape(1, H, B * T, d)


def chunked(
    q_BHTd: mx.array, k_BHKd: mx.array, v_BHKd: mx.array, scale: float, rows: PackedRows | None = None,
    *, chunk: int = ATTENTION_CHUNK, reach: int | None = None,
) -> mx.array:  # fmt: skip
    """Causal attention, inside documents if rows are packed, with the scores of one chunk of queries at a time.

    Of more keys than queries, the first ones are before the first query. Keys after the chunk are skipped, which halves
    the work of a long row, and so are those more than `reach` tokens before it, if no segment that matters is longer.
    The backward pass recomputes the scores, so O(C · K) of them are in memory instead of O(T²): Rabe & Staats,
    Self-attention Does Not Need O(n²) Memory, arXiv 2112.05682.
    """
    T, K = q_BHTd.shape[2], k_BHKd.shape[2]
    chunks = [
        Chunk(0 if reach is None else max(0, i - reach), i, min(i + chunk, T), before=K - T) for i in range(0, T, chunk)
    ]
    if len(chunks) == 1:
        return _attend(q_BHTd, k_BHKd, v_BHKd, scale=scale, rows=rows, part=chunks[0])

    @mx.custom_function
    def all_chunks(q_BHTd: mx.array, k_BHKd: mx.array, v_BHKd: mx.array) -> mx.array:
        attended: list[mx.array] = []
        for part in chunks:
            inputs = _after(attended[-1:], part.of(q_BHTd, k_BHKd, v_BHKd))
            attended.append(_attend(*inputs, scale=scale, rows=rows, part=part))
        return mx.concatenate(attended, axis=2)

    @all_chunks.vjp
    def _(primals: tuple[mx.array, ...], slope_BHTd: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        q_BHTd, k_BHKd, v_BHKd = primals
        dq_parts: list[mx.array] = []
        dk_BHKd, dv_BHKd = (mx.zeros(x.shape, mx.float32) for x in (k_BHKd, v_BHKd))
        for part in chunks:
            attend = partial(_attend, scale=scale, rows=rows, part=part)
            inputs = _after([*dq_parts[-1:], dk_BHKd, dv_BHKd], part.of(q_BHTd, k_BHKd, v_BHKd))
            dq, dk, dv = mx.vjp(attend, inputs, [slope_BHTd[:, :, part.start : part.stop]])[1]
            dq_parts.append(dq)
            around = [(0, 0), (0, 0), (part.first_key, K - part.keys.stop), (0, 0)]
            dk_BHKd, dv_BHKd = dk_BHKd + mx.pad(dk, around), dv_BHKd + mx.pad(dv, around)
        return mx.concatenate(dq_parts, axis=2), dk_BHKd.astype(k_BHKd.dtype), dv_BHKd.astype(v_BHKd.dtype)

    return cast(mx.array, all_chunks(q_BHTd, k_BHKd, v_BHKd))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of queries [start, stop), which see keys from `first_key` on."""

    first_key: int
    start: int
    stop: int
    before: int = 0  # keys before that of the first query

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.before + self.stop)

    def of(self, q_BHTd: mx.array, k_BHKd: mx.array, v_BHKd: mx.array) -> list[mx.array]:
        """Return the queries, and the keys and values that they may see."""
        return [q_BHTd[:, :, self.start : self.stop], k_BHKd[:, :, self.keys], v_BHKd[:, :, self.keys]]


def _attend(
    q_BHCd: mx.array, k_BHKd: mx.array, v_BHKd: mx.array, *, scale: float, rows: PackedRows | None, part: Chunk
) -> mx.array:
    mask = "causal" if rows is None else _mask(rows, part)
    return mx.fast.scaled_dot_product_attention(q_BHCd, k_BHKd, v_BHKd, scale=scale, mask=mask)


def _after(results: list[mx.array], inputs: list[mx.array]) -> list[mx.array]:
    """Make the inputs depend on the results: else MLX might hold the scores of all chunks at once."""
    return mx.depends(inputs, results) if results else inputs


def _mask(rows: PackedRows, part: Chunk) -> mx.array:
    """Which of its K keys each of the C queries of a chunk sees: bool [B, 1, C, K]."""
    segments_BT, queries, keys = rows.segments_BT, slice(part.start, part.stop), part.keys
    is_same_BCK = segments_BT[:, queries, None] == segments_BT[:, None, keys]
    seen_BCK = is_same_BCK & (mx.arange(part.start, part.stop)[:, None] >= mx.arange(part.first_key, part.stop))
    if rows.shared is not None:
        seen_BCK |= rows.shared.seen(segments_BT, rows.offset, queries, keys)
    return seen_BCK[:, None]


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
