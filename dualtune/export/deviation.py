"""How far one model is from another: log-probabilities after every token of fixed prompts.

Shape suffixes: T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dualtune.backend import Engine
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.evaluate.fingerprints import PROMPTS, logprobs_of

# Shares of what the adapter changes, by divergence. Rounding to bfloat16 costs a few thousandths of it.
LOST = 0.02
NOISE = 1e-6  # nats: a divergence that float32 makes by itself

Logprobs = Sequence[np.ndarray]  # float64 [T, V] for each prompt


@dataclass(frozen=True, slots=True)
class Deviation:
    """The distance of a model from the one it stands for, over all positions of the prompts."""

    kl: float  # mean Kullback-Leibler divergence, nats; infinite if the model computes NaN
    largest: float  # of a position, nats
    same_token: float  # share of the positions with the same most probable token


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of the prompts of the fingerprints."""
    return [tokenizer.encode(prompt, special=True).tolist() for prompt in PROMPTS]


def logprobs(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the engine's log-probabilities, float64 [T, V] for each prompt."""
    return [each.astype(np.float64) for each in logprobs_of(engine, prompts, [*map(len, prompts)])]


def deviation(expected: Logprobs, found: Logprobs) -> Deviation:
    """Compare p, which is expected, with q: Σ p log(p/q) in each position, over the tokens that both have."""
    kls, same = list[float](), list[bool]()
    for p_TV, q_TV in _aligned(expected, found):
        kl_T = (np.exp(p_TV) * (p_TV - q_TV)).sum(-1)
        kls += np.where(np.isfinite(kl_T), np.maximum(kl_T, 0.0), np.inf).tolist()
        same += (p_TV.argmax(-1) == q_TV.argmax(-1)).tolist()
    return Deviation(float(np.mean(kls)), float(np.max(kls)), float(np.mean(same)))


def lost_share(merge: Deviation, effect: Deviation) -> float:
    """Return the divergence of the merged model from base and adapter, as a share of what the adapter changes."""
    return merge.kl / max(effect.kl, NOISE / LOST)


def _aligned(expected: Logprobs, found: Logprobs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for p_TV, q_TV in zip(expected, found, strict=True):
        size = min(p_TV.shape[-1], q_TV.shape[-1])  # converters leave out or add rows beyond the vocabulary
        yield p_TV[:, :size], q_TV[:, :size]
