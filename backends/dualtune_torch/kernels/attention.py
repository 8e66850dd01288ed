"""Causal attention inside the documents of packed rows: no work is done between documents.

On a GPU this is FlashAttention over ragged sequences (`torch.nn.attention.varlen`). On a CPU the forward pass is
torch's flash kernel. Because its backward pass is slow, the backward pass on a CPU, and all code for windows and soft
caps, uses batched matrix products and a softmax, in blocks of queries that skip the keys after them. Short documents of
one length are computed at once. The backward pass recomputes the probabilities from the log-sum-exp of each row, as in
Dao et al., FlashAttention, arXiv 2205.14135, section 3.1.

A document that shares the beginning of another one (`Batch.parents_BT`) has the keys of this beginning before its own.

Legend: B rows, T tokens of a row, H query heads, G key/value heads, d head size; N documents of L tokens; within a
block Q queries, K keys, R = H / G · Q queries of all the heads that share a key/value head, P = N · G products.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from dualtune.base.errors import ConfigError
from dualtune.engine.documents import Branch, Span, alike
from dualtune_torch.card.checks import RAGGED_TORCH
from dualtune_torch.card.memory import ATTENTION_BLOCK
from dualtune_torch.kernels import compiled

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


class AtOnce(NamedTuple):
    """Documents that are computed at once: a single one, or short ones whose lengths round up to the same."""

    spans: Sequence[Span]
    length: int  # L. Tokens of the row after the end of a document are computed too, and discarded
    branch: Branch | None = None  # a single document with a parent

    def of(self, x_BFTx: Tensor) -> Tensor:
        """Return their part of a tensor [B, heads, T, …]: [N, heads, L, …], of a single document without a copy."""
        parts = [x_BFTx[row, :, start : start + self.length] for row, start, _ in self.spans]
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def keys(self, x_BGTd: Tensor) -> Tensor:
        """Return their keys, or values: those that a document shares with its parent, and its own."""
        own_NGLd = self.of(x_BGTd)
        if self.branch is None:
            return own_NGLd
        return torch.cat([x_BGTd[self.branch.row, None, :, self.of_parent], own_NGLd], dim=2)

    def put(self, x_NFLd: Tensor, into_BFTd: Tensor) -> None:
        """Write their part of a tensor."""
        for (row, start, end), x_FLd in zip(self.spans, x_NFLd, strict=True):
            into_BFTd[row, :, start:end] = x_FLd[:, : end - start]

    def put_keys(self, dx_NGKd: Tensor, into_BGTd: Tensor) -> None:
        """Write the gradient of their keys. What they share with a parent is added to what that has written."""
        self.put(dx_NGKd[:, :, self.shared :], into_BGTd)
        if self.branch is not None:
            into_BGTd[self.branch.row, :, self.of_parent] += dx_NGKd[0, :, : self.shared]

    @property
    def shared(self) -> int:
        return self.branch.shared if self.branch else 0

    @property
    def of_parent(self) -> slice:
        assert self.branch is not None
        return slice(self.branch.origin, self.branch.origin + self.branch.shared)


def at_once(spans: Sequence[Span], T: int, branches: Mapping[tuple[int, int], Branch]) -> list[AtOnce]:
    """Group the documents of rows of T tokens. A block of queries of a long one has as many scores as short ones."""
    lengths = [_rounded_up(start, end, T) for _, start, end in spans]
    plain = [place for place, span in enumerate(spans) if span[:2] not in branches]
    groups = [[plain[i] for i in group] for group in alike([lengths[place] for place in plain], ATTENTION_BLOCK**2)]
    own = [AtOnce([spans[place] for place in group], lengths[group[0]]) for group in groups]
    pairs = [(span, length) for span, length in zip(spans, lengths, strict=True) if span[:2] in branches]
    return own + [AtOnce([span], length, branches[span[:2]]) for span, length in pairs]


@dataclass(frozen=True, slots=True)
class DocumentBorders:
    """Where the documents of a micro-batch lie. All of it is known on the host, so nothing synchronizes the device."""

    spans: tuple[tuple[int, int, int], ...] | None  # row, first token, end; without padding. None: only on the device
    cu_seqlens: Tensor  # `borders_in` on the device
    longest: int
    maybe_compile: Callable[[Any], Any]  # `compiled.compile_function`, or the identity
    windows: set[int | None] = field(default_factory=set)  # filled by `attend`: the windows that the model uses
    groups: Sequence[AtOnce] = ()  # all documents; those with a parent after the others
    padding: Sequence[Span] = ()
    keys: GatheredKeys | None = None  # where documents have parents

    @classmethod
    def of(
        cls, segments_BT: np.ndarray, cu_seqlens: Tensor, maybe_compile: Callable[[Any], Any],
        branches: Sequence[Branch] = (), keys: GatheredKeys | None = None,
    ) -> DocumentBorders:  # fmt: skip
        T, borders = segments_BT.shape[1], borders_in(segments_BT)
        lengths = np.diff(borders)
        all_spans = [
            (start // T, start % T, start % T + length)
            for start, length in zip(borders.tolist(), lengths.tolist(), strict=False)
        ]
        spans, padding = (
            tuple(span for span in all_spans if bool(segments_BT[span[:2]]) is is_real) for is_real in (True, False)
        )
        groups = at_once(spans, T, {(branch.row, branch.start): branch for branch in branches})
        longest = int(lengths.max())
        return cls(spans, cu_seqlens, longest, maybe_compile, groups=groups, padding=padding, keys=keys)

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
    return DocumentAttention.apply(query, key, value, documents, scale, window, softcap), None


AttentionInterface.register(NAME, attend)


def _varlen(
    q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, where: DocumentBorders, scale: float, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if lacking := _lacking(varlen_attn):
        raise NotCovered(
            f"torch {torch.__version__} has FlashAttention without {', '.join(lacking)}, torch {RAGGED_TORCH} has it "
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
def _lacking(varlen_attn: Callable[..., Any]) -> list[str]:
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
    scale: float,
    window: int,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Recompute the probabilities, and the gradient of the raw scores: p · (dp − delta) · scale · slope of the cap.

    Both are zero for queries with an infinite log-sum-exp: those after the end of a document.
    """
    x_HQK = capped(scores_HQK.float() * scale, cap)
    probs_HQK = torch.where(_seen(at_Q, at_K, window) & (lse_HQ1 != torch.inf), (x_HQK - lse_HQ1).exp(), 0.0)
    slope = scale if cap is None else scale * (1 - (x_HQK / cap).square())
    dscores_HQK = probs_HQK * (dprobs_HQK.float() - delta_HQ1) * slope
    return probs_HQK.to(scores_HQK.dtype), dscores_HQK.to(scores_HQK.dtype)


class DocumentAttention(torch.autograd.Function):
    """`reference`, some documents at a time, and in the backward pass one block of queries at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTd: Tensor,
        k_BGTd: Tensor,
        v_BGTd: Tensor,
        documents: DocumentBorders,
        scale: float,
        window: int,
        cap: float | None,
    ) -> Tensor:
        out_BHTd, lses_NHL = _empty_by_token(q_BHTd, documents.padding), []
        for group in documents.groups:
            q_NHLd, k_NGKd, v_NGKd = group.of(q_BHTd), group.keys(k_BGTd), group.keys(v_BGTd)
            if q_BHTd.device.type == "cpu" and cap is None and window >= group.length and group.branch is None:
                out_NHLd, lse_NHL = _flash(q_NHLd, k_NGKd, v_NGKd, scale)
            else:
                out_NHLd, lse_NHL = _in_blocks(q_NHLd, k_NGKd, v_NGKd, scale, window, cap, documents.maybe_compile)
            group.put(out_NHLd, out_BHTd)
            for (_, start, end), lse_HL in zip(group.spans, lse_NHL, strict=True):
                lse_HL[:, end - start :].fill_(torch.inf)
            lses_NHL.append(lse_NHL)
        ctx.save_for_backward(q_BHTd, k_BGTd, v_BGTd, out_BHTd, *lses_NHL)
        ctx.rest = documents, scale, window, cap
        return out_BHTd.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout_BTHd: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BHTd, k_BGTd, v_BGTd, out_BHTd, *lses_NHL = ctx.saved_tensors
        documents, scale, window, cap = ctx.rest
        G, dout_BHTd = k_BGTd.shape[1], dout_BTHd.transpose(1, 2)
        delta_BHT = (dout_BTHd.float() * out_BHTd.transpose(1, 2)).sum(-1).transpose(1, 2).contiguous()
        longest = max((group.shared + group.length for group in documents.groups), default=0)
        at_K = torch.arange(longest, device=q_BHTd.device)
        dq_BHTd, dk_BGTd, dv_BGTd = (_empty_by_token(x, documents.padding) for x in (q_BHTd, k_BGTd, v_BGTd))
        for group, lse_NHL in zip(documents.groups, lses_NHL, strict=True):
            q_NHLd, dout_NHLd, delta_NHL = group.of(q_BHTd), group.of(dout_BHTd), group.of(delta_BHT)
            k_NGKd, v_NGKd = group.keys(k_BGTd), group.keys(v_BGTd)
            dq_NHLd, dk_NGKd, dv_NGKd = torch.empty_like(q_NHLd), torch.zeros_like(k_NGKd), torch.zeros_like(v_NGKd)
            for queries, keys in _blocks(group.length, window, group.shared):
                q_PRd, dout_PRd = (_rows(x_NHLd[:, :, queries], G) for x_NHLd in (q_NHLd, dout_NHLd))
                k_PKd, v_PKd = (x_NGKd[:, :, keys].flatten(0, 1) for x_NGKd in (k_NGKd, v_NGKd))
                scores_PRK, dprobs_PRK = q_PRd @ k_PKd.mT, dout_PRd @ v_PKd.mT
                by_head = len(q_NHLd) * len(q_NHLd[0]), -1, scores_PRK.shape[-1]
                probs_HQK, dscores_HQK = documents.maybe_compile(gradients)(
                    scores_PRK.view(by_head), dprobs_PRK.view(by_head),
                    *(x_NHL[:, :, queries].flatten(0, 1)[..., None] for x_NHL in (lse_NHL, delta_NHL)),
                    at_K[group.shared :][queries], at_K[keys], scale, window, cap,
                )  # fmt: skip
                dscores_PRK = dscores_HQK.view_as(scores_PRK)
                dv_NGKd[:, :, keys].add_((probs_HQK.view_as(scores_PRK).mT @ dout_PRd).unflatten(0, (-1, G)))
                dk_NGKd[:, :, keys].add_((dscores_PRK.mT @ q_PRd).unflatten(0, (-1, G)))
                dq_NHLd[:, :, queries] = (dscores_PRK @ k_PKd).view(*dq_NHLd.shape[:2], -1, dq_NHLd.shape[-1])
            group.put(dq_NHLd, dq_BHTd)
            group.put_keys(dk_NGKd, dk_BGTd)
            group.put_keys(dv_NGKd, dv_BGTd)
        return dq_BHTd, dk_BGTd, dv_BGTd, None, None, None, None


def _rounded_up(start: int, end: int, T: int) -> int:
    """Round up the length of a document, as far as its row has room."""
    return min(T, end + (start - end) % GRANULE) - start


def _rows(x_NHQd: Tensor, G: int) -> Tensor:
    """Return [P, R, d]: the queries of all heads that share a key/value head, one after another."""
    return x_NHQd.reshape(len(x_NHQd) * G, -1, x_NHQd.shape[-1])


def _flash(q_NHLd: Tensor, k_NGLd: Tensor, v_NGLd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in documents by torch's CPU kernel: [N, H, L, d], and the log-sum-exp of each row, [N, H, L]."""
    R = q_NHLd.shape[1] // k_NGLd.shape[1]
    k_NHLd, v_NHLd = (x_NGLd.repeat_interleave(R, 1) for x_NGLd in (k_NGLd, v_NGLd))
    out_NHLd, lse_NHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_NHLd, k_NHLd, v_NHLd, 0.0, True, scale=scale
    )
    return out_NHLd, lse_NHL.contiguous()  # by token: compiled code would choose its layout for all that it writes


def _in_blocks(
    q_NHLd: Tensor,
    k_NGKd: Tensor,
    v_NGKd: Tensor,
    scale: float,
    window: int,
    cap: float | None,
    maybe_compile: Callable[[Any], Any],
) -> tuple[Tensor, Tensor]:
    """Compute what `_flash` does, with a window and a soft cap, and with keys before those of the queries."""
    (N, H, L, d), (_, G, K, _) = q_NHLd.shape, k_NGKd.shape
    at_K = torch.arange(K, device=q_NHLd.device)
    out_NHLd, lse_NHL1 = q_NHLd.new_empty(N, H, L, d), q_NHLd.new_empty(N, H, L, 1, dtype=torch.float32)
    for queries, keys in _blocks(L, window, K - L):
        k_PKd, v_PKd = (x_NGKd[:, :, keys].flatten(0, 1) for x_NGKd in (k_NGKd, v_NGKd))
        scores_PRK = _rows(q_NHLd[:, :, queries], G) @ k_PKd.mT
        probs_HQK, lse_HQ1 = maybe_compile(probabilities)(
            scores_PRK.view(N * H, -1, scores_PRK.shape[-1]), at_K[K - L :][queries], at_K[keys], scale, window, cap
        )
        lse_NHL1[:, :, queries] = lse_HQ1.unflatten(0, (N, H))
        out_NHLd[:, :, queries] = (probs_HQK.view_as(scores_PRK) @ v_PKd).view(N, H, -1, d)
    return out_NHLd, lse_NHL1.squeeze(-1)


def _blocks(L: int, window: int, shared: int = 0) -> Iterator[tuple[slice, slice]]:
    """Yield the L queries of a document in blocks as large as allowed, each with the keys that any of them sees.

    Before the key of the first query there are `shared` others.
    """
    size = -(-L // -(-L // ATTENTION_BLOCK))
    for first in range(0, L, size):
        stop = min(first + size, L)
        yield slice(first, stop), slice(max(0, shared + first - window + 1), shared + stop)


def _empty_by_token(x_BHTd: Tensor, padding: Sequence[Span]) -> Tensor:
    """Return a tensor like x, in memory as [B, T, H, d]: the layers before read a token's heads contiguously. Zero in
    the padding, else not filled."""
    empty_BHTd = torch.empty_like(x_BHTd.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    for row, start, end in padding:
        empty_BHTd[row, :, start:end].zero_()
    return empty_BHTd


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
