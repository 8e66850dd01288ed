"""What a model says of the tokens of given texts: their log-probabilities, and the most probable tokens in their place.

Shape suffixes: T tokens of a text, k most probable tokens in the place of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dualtune.data.documents import in_memory
from dualtune.engine.adapter_bank import AdapterBank, adapters_of
from dualtune.engine.backend import Engine
from dualtune.train.activation_cache import each_alone


class TopTokens(NamedTuple):
    """The most probable tokens in the place of each token, the most probable one first."""

    tokens_Tk: np.ndarray  # int32; -1 in the place of a first token
    logprobs_Tk: np.ndarray  # float32; NaN in the place of a first token


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What a model says of the tokens of a text, each after those before it."""

    logprobs: np.ndarray  # float32 [T]; NaN of the first token, before which there is nothing
    top: TopTokens | None


def token_logprobs(
    engine: Engine, texts: Sequence[np.ndarray], top: int = 0,
    *, bank: AdapterBank | None = None, adapters: Sequence[int] | None = None,
) -> list[TokenLogprobs]:  # fmt: skip
    """Return what the model says of each text (int32 [T]), with the `top` most probable tokens, or without (0).

    Texts that are alike are computed once. `top` is at most the size of the vocabulary. With a bank, `adapters` is the
    number of each text's adapter in it, and texts of unlike adapters are computed together; CannotBatch as for
    `Engine.scoring`.
    """
    keys = [*zip(adapters_of(texts, adapters).tolist(), (text.tobytes() for text in texts), strict=True)]
    distinct = dict(zip(keys, texts, strict=True))
    longer = [key for key, text in distinct.items() if len(text) > 1]
    documents = in_memory((distinct[key], np.arange(len(distinct[key])) > 0) for key in longer)
    logprobs = dict.fromkeys(distinct, _after_first(top))
    for batch in each_alone(documents) if longer else ():
        own = [longer[document] for (document,) in batch.documents]
        with nullcontext() if bank is None else engine.scoring(bank, [adapter for adapter, _ in own]):
            parts = [engine.target_logprobs(batch)[batch.is_target_BT]]
            parts += engine.top_logprobs(batch, top) if top else ()
        ends = np.cumsum(batch.is_target_BT.sum(1))[:-1]
        rows = zip(*(np.split(part, ends) for part in parts), strict=True)
        logprobs |= {key: _after_first(top, row) for key, row in zip(own, rows, strict=True)}
    return [logprobs[key] for key in keys]


def _after_first(top: int, row: Sequence[np.ndarray] = ()) -> TokenLogprobs:
    """Return the scores of a text from those of all tokens but the first; the default is a text of one token."""
    logprobs, *others = row or (np.zeros(0),)
    logprobs = np.concatenate([[np.nan], logprobs]).astype(np.float32)
    if not top:
        return TokenLogprobs(logprobs, None)
    tokens, likely = others or (np.zeros((0, top)),) * 2
    first = np.full((1, top), -1), np.full((1, top), np.nan)
    return TokenLogprobs(logprobs, TopTokens(
        np.concatenate([first[0], tokens]).astype(np.int32), np.concatenate([first[1], likely]).astype(np.float32)
    ))  # fmt: skip
