"""Causal attention inside the documents of packed rows: no work is done between documents.

On a GPU this is FlashAttention over ragged sequences (`torch.nn.attention.varlen`). On a CPU the forward pass is
torch's flash kernel, document by document. Because its backward pass is slow, the backward pass on a CPU, and all code
for windows and soft caps, uses batched matrix products and a softmax per document, in blocks of queries that skip the
keys after them. The backward pass recomputes the probabilities from the log-sum-exp of each row, as in Dao et al.,
FlashAttention, arXiv 2205.14135, section 3.1. Short documents of similar length are one batch in both passes, because
to call an operation for each takes longer than to compute it (`benchmarks/fast_pieces.py`).

A document that shares the beginning of another one (`Batch.parents_BT`) has the keys of this beginning before its own.

Legend: B rows, T tokens of a row, N = B · T, H query heads, G key/value heads, d head size; within a block Q queries,
K keys, R = H / G · Q queries of all the heads that share a key/value head; in a batch D documents of L tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from dualtune.base.errors import ConfigError
from dualtune.engine.documents import Branch, Span, alike, one_a_row
from dualtune_torch.card.checks import RAGGED_TORCH
from dualtune_torch.card.memory import ATTENTION_BLOCK, SHORT
from dualtune_torch.kernels import compiled
from dualtune_torch.kernels.products import is_widened, product

NAME = "dualtune"  # of the implementation, in transformers' registry
GRANULE = 16  # tokens: CPU libraries compile a matrix product per shape, so lengths are rounded up to repeat
EVERYTHING = 1 << 30  # the window of a model without one
VARLEN_OPTIONS = ("scale", "window_size", "enable_gqa")  # torch 2.10 has none of them, 2.11 the first two
# Arguments of an attention function that make no difference to this one.
IRRELEVANT_OPTIONS = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits", "return_dict",
    "logits_to_keep",
}  # fmt: skip


class NotCovered(Exception):
    """A model needs a kind of attention that is not implemented here."""


@dataclass(frozen=True, slots=True)
class GatheredKeys:
    """The keys of each document of the concatenated rows, one document after another: those of its parent, its own.

    N tokens of the rows, M keys. A token is a key of up to C documents.
    """

    where_M: Tensor  # the token of each key, int64
    uses_CN: Tensor  # where each token is a key, int64; M: nowhere else
    cu_seqlens: Tensor  # where the keys of each document begin, and their end, int32
    longest: int


@dataclass(frozen=True, slots=True)
class AlikeDocuments:
    """Short documents of similar length as a batch: the shorter ones repeat their last token, whose results are unused.

    n tokens, without the repeated ones.
    """

    spans: tuple[Span, ...]
    tokens_DL: Tensor  # of the concatenated rows, int64
    is_repeated_DL: Tensor
    own_n: Tensor  # the places in the flat batch of what is not repeated, int64…
    tokens_n: Tensor  # …and its tokens

    @classmethod
    def of(cls, spans: Sequence[Span], T: int) -> AlikeDocuments:
        longest = max(end - start for _, start, end in spans)
        tokens_DL, is_own_DL = one_a_row(spans, T, min(T, -(-longest // GRANULE) * GRANULE))
        places = tokens_DL, ~is_own_DL, np.flatnonzero(is_own_DL), tokens_DL[is_own_DL]
        return cls(tuple(spans), *map(torch.from_numpy, places))

    def batch(self, x_BHTd: Tensor) -> Tensor:
        """Return the documents of x as a batch, [D, H, L, d], in memory as [D, L, H, d]."""
        x_NHd = x_BHTd.transpose(1, 2).flatten(0, 1)
        return x_NHd.index_select(0, self.tokens_DL.flatten()).unflatten(0, self.tokens_DL.shape).transpose(1, 2)

    def write(self, out_BTHd: Tensor, x_DHLd: Tensor) -> None:
        """Write what was computed of the documents where they lie in the rows."""
        x_nHd = x_DHLd.transpose(1, 2).flatten(0, 1).index_select(0, self.own_n)
        out_BTHd.flatten(0, 1).index_copy_(0, self.tokens_n, x_nHd)


@dataclass(frozen=True, slots=True)
class DocumentBorders:
    """Where the documents of a micro-batch lie. All of it is known on the host, so nothing synchronizes the device."""

    spans: tuple[Span, ...] | None  # without padding. None: only on the device
    cu_seqlens: Tensor  # `borders_in` on the device
    longest: int
    maybe_compile: Callable[[Any], Any]  # `compiled.compile_function`, or the identity
    windows: set[int | None] = field(default_factory=set)  # filled by `attend`: the windows that the model uses
    branches: Mapping[tuple[int, int], Branch] = field(default_factory=dict)  # by row and first token
    keys: GatheredKeys | None = None  # where documents have parents
    batches: tuple[AlikeDocuments, ...] = ()  # on a CPU

    @classmethod
    def of(
        cls, segments_BT: np.ndarray, cu_seqlens: Tensor, maybe_compile: Callable[[Any], Any],
        branches: Sequence[Branch] = (), keys: GatheredKeys | None = None,
    ) -> DocumentBorders:  # fmt: skip
        T, borders = segments_BT.shape[1], borders_in(segments_BT)
        lengths = np.diff(borders)
        spans = tuple(
            (start // T, start % T, start % T + length)
            for start, length in zip(borders.tolist(), lengths.tolist(), strict=False)
            if segments_BT.flat[start]
        )
        placed = {(branch.row, branch.start): branch for branch in branches}
        has_batches = not placed and not cu_seqlens.is_cuda
        groups = alike([end - start for _, start, end in spans], SHORT, ATTENTION_BLOCK) if has_batches else ()
        batches = tuple(AlikeDocuments.of([spans[i] for i in group], T) for group in groups)
        return cls(spans, cu_seqlens, int(lengths.max()), maybe_compile, set(), placed, keys, batches)

    @classmethod
    def on_device(cls, longest: int, cu_seqlens: Tensor, maybe_compile: Callable[[Any], Any]) -> DocumentBorders:
        """Documents of up to `longest` tokens, the borders of which may change after this."""
        return cls(None, cu_seqlens, longest, maybe_compile)


def borders_in(segments_BT: np.ndarray) -> np.ndarray:
    """Return where each document starts in the concatenated rows, and their end, int32; padding counts as documents."""
    rows, starts = np.nonzero(np.diff(segments_BT, axis=1, prepend=-1))
    return np.append(rows * segments_BT.shape[1] + starts, segments_BT.size).astype(np.int32)


def gathered(segments_BT: np.ndarray, branches: Sequence[Branch]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the three arrays of `GatheredKeys`, in their order."""
    T, placed = segments_BT.shape[1], {}
    for branch in branches:
        origin = branch.row * T + branch.origin
        placed[branch.row * T + branch.start] = np.arange(origin, origin + branch.shared)
    none = np.zeros(0, np.int64)
    keys = [
        np.concatenate([placed.get(start, none), np.arange(start, end)])
        for start, end in pairwise(borders_in(segments_BT).tolist())
    ]
    where_M = np.concatenate(keys)
    by_token_M = np.argsort(where_M, kind="stable")
    counts_N = np.bincount(where_M, minlength=segments_BT.size)
    uses_CN = np.full((counts_N.max(), segments_BT.size), len(where_M), np.int64)
    tokens_M = where_M[by_token_M]
    uses_CN[np.arange(len(where_M)) - (np.cumsum(counts_N) - counts_N)[tokens_M], tokens_M] = by_token_M
    return where_M, uses_CN, np.cumsum([0, *map(len, keys)], dtype=np.int32)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    documents: DocumentBorders | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, T, d], key and value [B, G, T, d] -> [B, T, H, d].

    Raises NotCovered for any other argument that would change the result.
    """
    needed = {name: value is not None for name, value in options.items() if name not in IRRELEVANT_OPTIONS}
    needed |= {"a mask": attention_mask is not None, "dropout": dropout > 0}
    needed["no causality"] = not getattr(module, "is_causal", True)
    if documents is None or any(needed.values()):
        missing = ", ".join(name for name, is_needed in needed.items() if is_needed) or "a cache"
        raise NotCovered(f"{type(module).__name__} needs more than causal attention ({missing})")
    # The trial of a model looks at the windows that it has used.
    documents.windows.add(sliding_window)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if query.is_cuda and query.dtype != torch.float32 and softcap is None:
        return _varlen(query, key, value, documents, scale, sliding_window), None
    if documents.spans is None:
        raise ConfigError(
            "model.kernels: got graph, but attention in float32, or with a soft cap, is launched document by document; "
            "allowed here: auto, fused, reference; or set model.dtype: bfloat16"
        )
    window = EVERYTHING if sliding_window is None else sliding_window
    batches = documents.batches if softcap is None and window >= documents.longest else ()
    batched = {span for batch in batches for span in batch.spans}
    alone = tuple((*span, documents.branches.get(span[:2])) for span in documents.spans if span not in batched)
    arguments = query, key, value, alone, batches, scale, window, softcap, documents.maybe_compile
    return DocumentAttention.apply(*arguments), None


AttentionInterface.register(NAME, attend)


def _varlen(
    q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, where: DocumentBorders, scale: float, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if missing := _missing_options(varlen_attn):
        raise NotCovered(
            f"torch {torch.__version__} has FlashAttention without {', '.join(missing)}, torch {RAGGED_TORCH} has it "
            f"with them. Run: pip install --upgrade 'torch>={RAGGED_TORCH}'"
        )
    B, _, T, _ = q_BHTd.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTd, k_BGTd, v_BGTd))
    cu_keys, longest = where.cu_seqlens, where.longest
    if (keys := where.keys) is not None:  # the last query of a document sees its last key
        k, v = (_Gathered.apply(x, keys.where_M, keys.uses_CN) for x in (k, v))
        cu_keys, longest = keys.cu_seqlens, keys.longest
    out = varlen_attn(
        q, k, v, where.cu_seqlens, cu_keys, where.longest, longest, scale=scale,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=q_BHTd.shape[1] != k_BGTd.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.unflatten(0, (B, T))


class _Gathered(torch.autograd.Function):
    """x_NGd[where_M], whose gradient is a sum in a fixed order: that of indexing adds atomically."""

    @staticmethod
    def forward(ctx: Any, x_NGd: Tensor, where_M: Tensor, uses_CN: Tensor) -> Tensor:
        ctx.save_for_backward(uses_CN)
        return x_NGd.index_select(0, where_M)

    @staticmethod
    def backward(ctx: Any, dout_MGd: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (uses_CN,) = ctx.saved_tensors
        with_zero = torch.cat([dout_MGd, dout_MGd.new_zeros(1, *dout_MGd.shape[1:])])
        first, *others = (with_zero.index_select(0, uses_N) for uses_N in uses_CN)
        return sum(others, first), None, None


@cache  # it is asked in every layer of every step
def _missing_options(varlen_attn: Callable[..., Any]) -> list[str]:
    """Return the arguments that this torch's function does not have."""
    parameters = inspect.signature(varlen_attn).parameters
    return [name for name in VARLEN_OPTIONS if name not in parameters]


def reference(
    q_BHTd: Tensor,
    k_BGTd: Tensor,
    v_BGTd: Tensor,
    segments_BT: Tensor,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """softmax(capped(q·kᵀ · scale) + mask) · v with a dense mask: [B, T, H, d]."""
    at_T = torch.arange(q_BHTd.shape[2], device=q_BHTd.device)
    far_TT = at_T[:, None] - at_T
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None]) & (far_TT >= 0)
    if window is not None:
        seen_BTT &= far_TT < window
    k_BHTd, v_BHTd = (x.repeat_interleave(q_BHTd.shape[1] // x.shape[1], 1) for x in (k_BGTd, v_BGTd))
    scores = capped((q_BHTd @ k_BHTd.mT).float() * scale, cap)
    probs = scores.masked_fill(~seen_BTT[:, None], -torch.inf).softmax(-1).to(v_BHTd.dtype)
    return (probs @ v_BHTd).transpose(1, 2)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap), the soft cap of Gemma 2 (arXiv 2408.00118) on scores and logits."""
    return x if cap is None else cap * torch.tanh(x / cap)


def _seen(at_Q: Tensor, at_K: Tensor, window: int) -> Tensor:
    """Which keys each query sees, by their positions in the row: bool [Q, K]."""
    far_QK = at_Q[:, None] - at_K
    return (far_QK >= 0) & (far_QK < window)


def probabilities(
    scores_HQK: Tensor, at_Q: Tensor, at_K: Tensor, scale: float, window: int, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities in the dtype of the scores, and the log-sum-exp of each row, float32 [H, Q, 1]."""
    x_HQK = torch.where(_seen(at_Q, at_K, window), capped(scores_HQK.float() * scale, cap), -torch.inf)
    top_HQ1 = x_HQK.amax(-1, keepdim=True)
    e_HQK = (x_HQK - top_HQ1).exp()
    sum_HQ1 = e_HQK.sum(-1, keepdim=True)
    # Not exp(x − lse): for large scores the rounding of the log-sum-exp would be visible.
    return (e_HQK / sum_HQ1).to(scores_HQK.dtype), top_HQ1 + sum_HQ1.log()


def gradients(
    scores_HQK: Tensor,
    dprobs_HQK: Tensor,
    lse_HQ1: Tensor,
    delta_HQ1: Tensor,
    at_Q: Tensor,
    at_K: Tensor,
    end: int,
    scale: float,
    window: int,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Recompute the probabilities, and the gradient of the raw scores: p · (dp − delta) · scale · slope of the cap.

    Both are zero for queries at or after the end of the document.
    """
    x_HQK = capped(scores_HQK.float() * scale, cap)
    probs_HQK = torch.where(_seen(at_Q, at_K, window) & (at_Q < end)[:, None], (x_HQK - lse_HQ1).exp(), 0.0)
    slope = scale if cap is None else scale * (1 - (x_HQK / cap).square())
    dscores_HQK = probs_HQK * (dprobs_HQK.float() - delta_HQ1) * slope
    return probs_HQK.to(scores_HQK.dtype), dscores_HQK.to(scores_HQK.dtype)


class DocumentAttention(torch.autograd.Function):
    """`reference`, one document at a time, and in the backward pass one block of queries at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTd: Tensor,
        k_BGTd: Tensor,
        v_BGTd: Tensor,
        spans: tuple[tuple[int, int, int, Branch | None], ...],
        batches: tuple[AlikeDocuments, ...],
        scale: float,
        window: int,
        cap: float | None,
        maybe_compile: Callable[[Any], Any],
    ) -> Tensor:
        B, H, T, d = q_BHTd.shape
        out_BTHd = q_BHTd.new_zeros(B, T, H, d)  # padding stays zero
        lse_BHT = q_BHTd.new_empty(B, H, T, dtype=torch.float32)
        for b, start, end, branch in spans:
            L, beyond = end - start, _beyond(start, end, T)
            q_HLd = q_BHTd[b, :, start:beyond]
            k_GKd, v_GKd = (_keys(x_BGTd[b], start, beyond, branch) for x_BGTd in (k_BGTd, v_BGTd))
            if q_BHTd.device.type == "cpu" and cap is None and window >= beyond - start and branch is None:
                (out_HLd,), (lse_HL,) = _flash(q_HLd[None], k_GKd[None], v_GKd[None], scale)
            else:
                out_HLd, lse_HL = _in_blocks(q_HLd, k_GKd, v_GKd, scale, window, cap, maybe_compile)
            out_BTHd[b, start:end] = out_HLd[:, :L].transpose(0, 1)
            lse_BHT[b, :, start:end] = lse_HL[:, :L]
        lse_DHL = []
        for documents in batches:
            q_DHLd, k_DGLd, v_DGLd = map(documents.batch, (q_BHTd, k_BGTd, v_BGTd))
            out_DHLd, lse = _flash(q_DHLd, k_DGLd, v_DGLd, scale)
            documents.write(out_BTHd, out_DHLd)
            lse_DHL.append(lse)
        ctx.save_for_backward(q_BHTd, k_BGTd, v_BGTd, out_BTHd, lse_BHT, *lse_DHL)
        ctx.rest = spans, batches, scale, window, cap, maybe_compile
        return out_BTHd

    @staticmethod
    def backward(ctx: Any, dout_BTHd: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BHTd, k_BGTd, v_BGTd, out_BTHd, lse_BHT, *lse_DHL = ctx.saved_tensors
        dtype = q_BHTd.dtype
        if is_widened(q_BHTd):
            q_BHTd, k_BGTd, v_BGTd, dout_BTHd = (x.float() for x in (q_BHTd, k_BGTd, v_BGTd, dout_BTHd))
        spans, batches, scale, window, cap, maybe_compile = ctx.rest
        (_, H, T, d), G = q_BHTd.shape, k_BGTd.shape[1]
        longest = max((branch.shared for *_, branch in spans if branch), default=0) + T
        at_K = torch.arange(longest, device=q_BHTd.device)
        delta_BTH = (dout_BTHd.float() * out_BTHd).sum(-1)
        dq_BHTd, dk_BGTd, dv_BGTd = (_zeros_by_token(x) for x in (q_BHTd, k_BGTd, v_BGTd))
        for b, start, end, branch in spans:
            beyond, shared = _beyond(start, end, T), branch.shared if branch else 0
            k_GSd, v_GSd = (_keys(x_BGTd[b], start, beyond, branch) for x_BGTd in (k_BGTd, v_BGTd))
            # Of a document with a parent these are copies, added below.
            dk_GSd, dv_GSd = (
                torch.zeros_like(keys) if branch else dx_BGTd[b, :, start:beyond]
                for keys, dx_BGTd in ((k_GSd, dk_BGTd), (v_GSd, dv_BGTd))
            )
            for within, keys in _blocks(beyond - start, window, shared):
                queries = slice(start + within.start, start + within.stop)
                at_Q, Q = at_K[shared + within.start : shared + within.stop], within.stop - within.start
                q_GRd, k_GKd, v_GKd = q_BHTd[b, :, queries].reshape(G, -1, d), k_GSd[:, keys], v_GSd[:, keys]
                dout_GRd = dout_BTHd[b, queries].transpose(0, 1).reshape(G, -1, d)
                scores_GRK, dprobs_GRK = q_GRd @ k_GKd.mT, dout_GRd @ v_GKd.mT
                probs_HQK, dscores_HQK = maybe_compile(gradients)(
                    scores_GRK.view(H, Q, -1), dprobs_GRK.view(H, Q, -1), lse_BHT[b, :, queries, None],
                    delta_BTH[b, queries].T[..., None], at_Q, at_K[keys], shared + end - start, scale, window, cap,
                )  # fmt: skip
                dscores_GRK = dscores_HQK.view_as(scores_GRK)
                dv_GSd[:, keys] += probs_HQK.view_as(scores_GRK).mT @ dout_GRd
                dk_GSd[:, keys] += dscores_GRK.mT @ q_GRd
                dq_BHTd[b, :, queries] = (dscores_GRK @ k_GKd).view(H, Q, d)  # beyond the end: zero, overwritten later
            if branch is not None:
                origin = slice(branch.origin, branch.origin + shared)
                for dx_BGTd, dx_GSd in ((dk_BGTd, dk_GSd), (dv_BGTd, dv_GSd)):
                    dx_BGTd[b, :, origin] += dx_GSd[:, :shared]
                    dx_BGTd[b, :, start:beyond] += dx_GSd[:, shared:]
        for documents, lse in zip(batches, lse_DHL, strict=True):
            inputs = q_BHTd, k_BGTd, v_BGTd, dout_BTHd.transpose(1, 2), delta_BTH.transpose(1, 2)[..., None]
            dx_DHLd = _batch_gradients(documents, *inputs, lse, at_K, scale, maybe_compile)
            for dx_BHTd, dx in zip((dq_BHTd, dk_BGTd, dv_BGTd), dx_DHLd, strict=True):
                documents.write(dx_BHTd.transpose(1, 2), dx)
        return *(dx.to(dtype) for dx in (dq_BHTd, dk_BGTd, dv_BGTd)), None, None, None, None, None, None


def _batch_gradients(
    documents: AlikeDocuments, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, dout_BHTd: Tensor, delta_BHT1: Tensor,
    lse_DHL: Tensor, at_T: Tensor, scale: float, maybe_compile: Callable[[Any], Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, [D, H or G, L, d], in the documents of a batch."""
    (D, L), (_, H, _, d), G = documents.tokens_DL.shape, q_BHTd.shape, k_BGTd.shape[1]
    q_GRd, k_GLd, v_GLd, dout_GRd = (
        documents.batch(x_BHTd).reshape(D * G, -1, d) for x_BHTd in (q_BHTd, k_BGTd, v_BGTd, dout_BHTd)
    )
    # A repeated token has no gradient: its row of the scores is probabilities times (0 - 0).
    delta_DHL1 = documents.batch(delta_BHT1)
    for x_DHLd in (dout_GRd.view(D, H, L, d), delta_DHL1):
        x_DHLd.masked_fill_(documents.is_repeated_DL[:, None, :, None], 0)
    scores_GRL, dprobs_GRL = q_GRd @ k_GLd.mT, dout_GRd @ v_GLd.mT
    probs_HLL, dscores_HLL = maybe_compile(gradients)(
        scores_GRL.view(D * H, L, L), dprobs_GRL.view(D * H, L, L), lse_DHL.reshape(D * H, L, 1),
        delta_DHL1.reshape(D * H, L, 1), at_T[:L], at_T[:L], L, scale, EVERYTHING, None,
    )  # fmt: skip
    probs_GRL, dscores_GRL = (x_HLL.view_as(scores_GRL) for x_HLL in (probs_HLL, dscores_HLL))
    dq_GRd, dk_GLd, dv_GLd = dscores_GRL @ k_GLd, dscores_GRL.mT @ q_GRd, probs_GRL.mT @ dout_GRd
    return dq_GRd.view(D, H, L, d), dk_GLd.view(D, G, L, d), dv_GLd.view(D, G, L, d)


def _keys(x_GTd: Tensor, start: int, beyond: int, branch: Branch | None) -> Tensor:
    """Return the keys, or the values, of a document: those that it shares with its parent, and its own."""
    own_GLd = x_GTd[:, start:beyond]
    if branch is None:
        return own_GLd
    return torch.cat([x_GTd[:, branch.origin : branch.origin + branch.shared], own_GLd], dim=1)


def _beyond(start: int, end: int, T: int) -> int:
    """Round up the end of a document. The tokens after it in the row are computed too, masked and discarded."""
    return min(T, end + (start - end) % GRANULE)


def _flash(q_DHLd: Tensor, k_DGLd: Tensor, v_DGLd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in documents of L tokens by torch's CPU kernel: [D, H, L, d], and each row's log-sum-exp, [D, H, L]."""
    R = q_DHLd.shape[1] // k_DGLd.shape[1]
    k_DHLd, v_DHLd = (x_DGLd.repeat_interleave(R, 1) for x_DGLd in (k_DGLd, v_DGLd))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_DHLd, k_DHLd, v_DHLd, 0.0, True, scale=scale)


def _in_blocks(
    q_HLd: Tensor,
    k_GKd: Tensor,
    v_GKd: Tensor,
    scale: float,
    window: int,
    cap: float | None,
    maybe_compile: Callable[[Any], Any],
) -> tuple[Tensor, Tensor]:
    """Compute what `_flash` does, with a window and a soft cap, and with keys before those of the queries."""
    (H, L, d), (G, K, _) = q_HLd.shape, k_GKd.shape
    at_K = torch.arange(K, device=q_HLd.device)
    out_HLd, lse_HL1 = q_HLd.new_empty(H, L, d), q_HLd.new_empty(H, L, 1, dtype=torch.float32)
    for queries, keys in _blocks(L, window, K - L):
        scores_GRK = product(q_HLd[:, queries].reshape(G, -1, d), k_GKd[:, keys].mT)
        scores_HQK = scores_GRK.view(H, -1, scores_GRK.shape[-1])
        probs_HQK, lse_HL1[:, queries] = maybe_compile(probabilities)(
            scores_HQK, at_K[K - L :][queries], at_K[keys], scale, window, cap
        )
        out_HLd[:, queries] = product(probs_HQK.view_as(scores_GRK), v_GKd[:, keys]).view(H, -1, d)
    return out_HLd, lse_HL1.squeeze(-1)


def _blocks(L: int, window: int, shared: int = 0) -> Iterator[tuple[slice, slice]]:
    """Yield the L queries of a document in blocks as large as allowed, each with the keys that any of them sees.

    Before the key of the first query there are `shared` others.
    """
    size = -(-L // -(-L // ATTENTION_BLOCK))
    for first in range(0, L, size):
        stop = min(first + size, L)
        yield slice(first, stop), slice(max(0, shared + first - window + 1), shared + stop)


def _zeros_by_token(x_BHTd: Tensor) -> Tensor:
    """Zeros in the shape of x, in memory as [B, T, H, d]: the layers before read a token's heads contiguously."""
    return torch.zeros_like(x_BHTd.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------------
# `dualtune bench attention` on torch: `attend` beside what transformers computes otherwise.


class _Layer(torch.nn.Module):
    """What transformers' attention functions ask of the module that calls them."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


def attention_works(
    device: torch.device, T: int, H: int, G: int, d: int, dtype: torch.dtype
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Return forward and backward passes of one document of T tokens, by name: see `dualtune.doctor.bench.attention`.

    `eager` is Llama's in transformers, with the mask that it is given; `sdpa` is transformers' choice for a GPU.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    generator = torch.Generator().manual_seed(0)
    shapes = ((1, H, T, d), (1, G, T, d), (1, G, T, d), (1, T, H, d))
    q, k, v, dout = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes)
    segments_1T = np.ones((1, T), np.int32)
    is_compiled = compiled.why_not(device) is None
    borders = torch.from_numpy(borders_in(segments_1T)).to(device)
    documents = DocumentBorders.of(segments_1T, borders, compiled.compile_function if is_compiled else lambda f: f)
    layer, scale = _Layer(H // G), d**-0.5

    def eager(q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> Tensor:
        future_TT = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
        mask_TT = torch.zeros(T, T, dtype=dtype, device=device).masked_fill(future_TT, torch.finfo(dtype).min)
        return eager_attention_forward(layer, q_BHTd, k_BGTd, v_BGTd, mask_TT, scaling=scale)[0]

    functions: dict[str, Callable[..., Tensor]] = {
        "ours": lambda q, k, v: attend(layer, q, k, v, None, scaling=scale, documents=documents)[0],
        "sdpa": lambda q, k, v: sdpa_attention_forward(layer, q, k, v, None, scaling=scale)[0],
        "eager": eager,
    }

    def work(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        results = out.detach(), *torch.autograd.grad(out, inputs, dout)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return results

    return {name: partial(work, function) for name, function in functions.items()}
