"""Fingerprints of a model with its adapter: a few outputs, stored with the adapter and recomputed elsewhere.

An entry of dualtune.json, one for each prompt:

    {"prompt": text, "tokens": [ids], "dtype": compute dtype, "top": [[id, log p], … of the 5 most probable],
     "earlier": [the same as "top" after each of the tokens before the last, oldest first, at most 7]}

Entries of an older dualtune have only `tokens` and `top`. All texts are computed in one batch. In float32 the recorded
ids are nevertheless those of each text alone, in their order; log p differs from it by rounding.

Shape suffixes: P recorded positions, V vocabulary, K recorded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualtune.base.errors import NonFiniteError
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import IGNORE_INDEX, NOISE, Batch, Engine
from dualtune.train.evaluation import using

PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "Once upon a time, there was a",
    "Q: What is 7 + 5?\nA:",
    "Zürich, 東京,\t1 024 €: ",  # for tokenizers: non-ASCII characters, a tab, digits, a trailing space
)
TOP_K = 5
EARLIER = 7  # positions before the last; eight in all separate a small error from rounding far better than one
PLAUSIBLE = 1e-3  # log-probabilities of rarer tokens are mostly rounding
ROUNDING = 5e-7  # of the stored values: six decimal places
MOST_TOKENS = 128  # of a batch of texts, padding included: they have a log p for each token of the vocabulary

Entry = dict[str, Any]
Top = list[tuple[int, float]]


def fingerprints(engine: Engine, tokenizer: Tokenizer) -> list[Entry]:
    """Return an entry for each fixed prompt. NonFiniteError if the model computes NaN."""
    texts = [tokenizer.encode(prompt, special=True) for prompt in PROMPTS]
    outputs = logprobs_of(engine, texts, [1 + EARLIER] * len(texts))
    dtype = engine.description.dtype
    return [
        _entry(prompt, ids, dtype, logprobs_PV)
        for prompt, ids, logprobs_PV in zip(PROMPTS, texts, outputs, strict=True)
    ]


def base_fingerprints(engine: Engine, tokenizer: Tokenizer) -> list[Entry]:
    """Return the same for the base model without the adapter."""
    with without_adapter(engine):
        return fingerprints(engine, tokenizer)


def without_adapter(engine: Engine) -> AbstractContextManager[None]:
    """Disable the adapter inside the block by loading the neutral state."""
    return using(engine, engine.neutral_state())


def _entry(prompt: str, ids: np.ndarray, dtype: str, logprobs_PV: np.ndarray) -> Entry:
    tops: list[list[list[int | float]]] = []
    for logprobs_V in logprobs_PV:
        likely = np.argsort(-logprobs_V, kind="stable")[:TOP_K]
        tops.append([[int(i), round(float(logprobs_V[i]), 6)] for i in likely])
    *earlier, top = tops
    if not np.isfinite([logprob for pairs in tops for _, logprob in pairs]).all():
        raise NonFiniteError(
            f"the log-probabilities after {prompt!r} are not finite. No adapter was written. "
            "Lower train.learning_rate, or use model.dtype: float32"
        )
    return {"prompt": prompt, "tokens": ids.tolist(), "dtype": dtype, "top": top, "earlier": earlier}


Text = Sequence[int] | np.ndarray  # token ids [T]


def logprobs_of(engine: Engine, texts: Sequence[Text], num_last: Sequence[int]) -> list[np.ndarray]:
    """Return the engine's log p [P, V] after the last P tokens of each text. `P` of each text is given."""
    outputs = [np.zeros(0)] * len(texts)
    waiting = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    while waiting:
        count = max(1, MOST_TOKENS // len(texts[waiting[0]]))
        rows, waiting = waiting[:count], waiting[count:]
        logprobs_BTV = engine.logprobs(plain_batch(*(texts[i] for i in rows)))
        for i, logprobs_TV in zip(rows, logprobs_BTV, strict=True):
            end = len(texts[i])
            last_PV = logprobs_TV[max(0, end - num_last[i]) : end]
            if len(rows) > 1 and engine.description.dtype == "float32" and _has_ties(last_PV):
                last_PV = engine.logprobs(plain_batch(texts[i]))[0, -num_last[i] :]
            outputs[i] = last_PV.copy()  # of a batch that is far larger
    return outputs


def _has_ties(logprobs_PV: np.ndarray) -> bool:
    """Return whether rounding in a batch may change which tokens are the most probable ones, or their order."""
    last = min(TOP_K, logprobs_PV.shape[-1] - 1)
    likely_PK = -np.sort(np.partition(-logprobs_PV, last)[:, : last + 1])
    with np.errstate(invalid="ignore"):  # of infinite ones
        return bool((-np.diff(likely_PK) < 2 * NOISE["float32"]).any())


def plain_batch(*texts: Text) -> Batch:
    """Return a batch of texts, one in each row, without labels: to compute their log-probabilities."""
    tokens_BT, segments_BT, positions_BT = np.zeros((3, len(texts), max(map(len, texts))), np.int32)
    for b, ids in enumerate(texts):
        tokens_BT[b, : len(ids)] = ids
        segments_BT[b, : len(ids)] = 1
        positions_BT[b, : len(ids)] = np.arange(len(ids))
    no_labels_BT = np.full_like(tokens_BT, IGNORE_INDEX)
    return Batch(tokens_BT, no_labels_BT, segments_BT, positions_BT, np.zeros(tokens_BT.shape, np.uint32))


# --- recomputing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference between recomputed and recorded values, over all recorded positions."""

    num_positions: int
    top1: float  # share of the positions with the same most probable token
    kl: float  # mean over the positions, in nats: a lower bound of the true one
    max_kl: float
    logprob: float  # largest difference of log p, over the recorded tokens with p >= PLAUSIBLE


def recorded_tops(entry: Entry) -> list[Top]:
    """Return the recorded values by position, the last token's at the end."""
    return [[(int(i), float(p)) for i, p in top] for top in (*entry.get("earlier", ()), entry["top"])]


def recompute(engine: Engine, entries: Sequence[Entry]) -> list[np.ndarray]:
    """Return the engine's log p [P, V] after the recorded positions of each entry."""
    return logprobs_of(engine, [entry["tokens"] for entry in entries], [len(recorded_tops(entry)) for entry in entries])


def gap(entries: Sequence[Entry], outputs: Sequence[np.ndarray]) -> Gap:
    """Return the gap between recorded and recomputed values. A value that is not finite counts as infinite."""
    same, kls, gaps = list[bool](), list[float](), list[float]()
    for entry, logprobs_PV in zip(entries, outputs, strict=True):
        for top, logprobs_V in zip(recorded_tops(entry), logprobs_PV, strict=True):
            p_K = np.array([p for _, p in top])
            q_K = logprobs_V[[i for i, _ in top]].astype(np.float64)
            same.append(int(np.argmax(logprobs_V)) == top[0][0])
            kls.append(kl_bound(p_K, q_K))
            likely = p_K >= min(np.log(PLAUSIBLE), p_K[0])
            gaps.append(float(np.abs(p_K - q_K)[likely].max()))
    worst = [np.inf if np.isnan(x) else x for x in (np.mean(kls), np.max(kls), np.max(gaps))]
    return Gap(len(same), float(np.mean(same)), *map(float, worst))


def kl_bound(p_K: np.ndarray, q_K: np.ndarray) -> float:
    """Return Σ p log(p/q) over the recorded tokens, from log p and log q, plus one term for all other tokens together.

    Summing over tokens is data processing, which never increases the divergence (Cover & Thomas, Elements of
    Information Theory, 2nd ed., theorem 2.7.1, the log sum inequality): a lower bound of KL(p‖q).
    """
    if np.isnan(q_K).any():
        return np.inf
    p_rest, q_rest = (max(1.0 - float(np.exp(x_K).sum()), ROUNDING) for x_K in (p_K, q_K))
    kl = float(np.sum(np.exp(p_K) * (p_K - q_K))) + p_rest * float(np.log(p_rest / q_rest))
    return max(kl, 0.0)  # rounding may make it slightly negative


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of the adapter on the log-probabilities (adapter − base), recomputed and recorded."""

    size: float  # ⟨computed, recorded⟩ / ‖recorded‖²: 1 is equal, 2 twice as much, 0 no effect
    error: float  # ‖computed − recorded‖ / ‖recorded‖
    rms: float  # of the recorded effect, root mean square, nats


def effect(
    base: Sequence[Entry], adapter: Sequence[Entry], base_outputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
) -> Effect | None:
    """Return the effect over the tokens recorded for both. None if there are none, or if no effect is visible."""
    recorded, computed = list[float](), list[float]()
    for base_entry, entry, base_PV, logprobs_PV in zip(base, adapter, base_outputs, outputs, strict=True):
        tops = zip(recorded_tops(base_entry), recorded_tops(entry), base_PV, logprobs_PV, strict=True)
        for base_top, top, base_V, logprobs_V in tops:
            of_base = dict(base_top)
            for i, p in top:
                if i in of_base:
                    recorded.append(p - of_base[i])
                    computed.append(float(logprobs_V[i]) - float(base_V[i]))
    x, y = np.array(recorded), np.array(computed)
    norm = float(x @ x)
    if not norm > len(x) * ROUNDING**2 or not np.isfinite(y).all():
        return None
    return Effect(float(x @ y) / norm, float(np.linalg.norm(y - x)) / norm**0.5, float(np.sqrt(norm / len(x))))
