"""Choosing the next token, in NumPy, so that all backends draw the same tokens from the same logits.

What is random is a function of (seed, number of the prompt, number of the sample, position): one uniform number, the
share of the kept probability at which the token lies, with the most probable token first.
Shape suffixes: B rows, K likely tokens, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualtune.engine.decoding import LikelyRow, NextLogits

LIKELY = 1e-4  # times the largest probability: of all tokens, those above it are looked at first
LIKELY_TOKENS = 256  # of each row, which leave the device; all do where these do not decide


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy.

    What is left out is what transformers leaves out: all but the `top_k` most probable tokens (0: none), of these all
    but the smallest set with a probability of at least `top_p`, and tokens less probable than `min_p` times the most
    probable one (Holtzman et al., arXiv 1904.09751; Nguyen et al., arXiv 2407.01082).
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Penalties:
    """How much less likely a token is for each time it was chosen (frequency), and if it was at all (presence).

    As in OpenAI's API: of the tokens of the answer, not those of the prompt.
    """

    frequency: float = 0.0
    presence: float = 0.0

    def applied(self, logits_V: np.ndarray, counts: Counter[int]) -> np.ndarray:
        """Return a copy of the logits [V], less frequency · count + presence for each token with a count."""
        logits_V = logits_V.copy()
        logits_V[[*counts]] -= self.frequency * np.array([*counts.values()], logits_V.dtype) + self.presence
        return logits_V


class Chooser:
    """Chooses the tokens of one continuation, one a call, and None where it ends.

    `numbers`: of the prompt and of the sample, on which its random numbers depend. `first`: texts as token ids, with
    one of which the continuation begins; the most probable tokens decide with which.
    """

    def __init__(
        self, sampling: Sampling, stop_ids: frozenset[int], *, numbers: Sequence[int] = (),
        keeps_logprobs: bool = False, penalties: Penalties | None = None, first: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        self.sampling, self._stop_ids = sampling, stop_ids
        self._penalties, self._begins = penalties, first
        self._counts: Counter[int] = Counter()  # how often a token was chosen
        # NumPy fills the seed up with zeros: the numbers (), (0,) and (0, 0) draw the same.
        self._rng = np.random.default_rng([sampling.seed, 3, *numbers])
        self._u: float | None = None  # drawn for the next token, which is not chosen yet
        self._produced = 0
        self.stopped_by: int | None = None  # the token that ended it
        # Of each token and of the one that ended it: log p of the model, whatever was left out at whatever temperature.
        self.logprobs: list[float] | None = [] if keeps_logprobs else None

    def __call__(self, logits_V: np.ndarray) -> int | None:
        """Return the next token id for its logits, float32 [V]."""
        if self._produced == self.sampling.max_tokens:
            return None
        changed_V = self._penalties.applied(logits_V, self._counts) if self._penalties else logits_V
        allowed = [text_ids[0] for text_ids in self._begins] if all(self._begins) else []  # one is whole: all is free
        if allowed:
            changed_V = np.where(np.isin(np.arange(len(logits_V)), allowed), changed_V, -np.inf)
        token = int(np.argmax(changed_V)) if self.sampling.temperature == 0 else self._sample(changed_V)
        self._begins = [text_ids[1:] for text_ids in self._begins if text_ids[0] == token] if allowed else ()
        if self.logprobs is not None:
            shifted_V = logits_V.astype(np.float64) - logits_V.max()
            self.logprobs.append(float(shifted_V[token] - np.log(np.exp(shifted_V).sum())))
        return self._taken(token)

    def index_among(self, likely: LikelyRow) -> int | None:
        """Return the index of the next token among the likely ones. None if it may be another: all logits decide."""
        if self._penalties or self._begins or self._produced == self.sampling.max_tokens:
            return None
        if self.sampling.temperature == 0:
            return 0
        probs_K = np.exp(likely.logits_K.astype(np.float64) / self.sampling.temperature - likely.tempered_sum)
        # A temperature that is 0 in float32 leaves no numbers.
        return self._drawn(probs_K, is_all=False) if np.isfinite(probs_K[0]) else None

    def take(self, likely: LikelyRow, index: int) -> int | None:
        """Take a likely token. Return its id, or None if it ends the continuation."""
        if self.logprobs is not None:
            self.logprobs.append(float(likely.logits_K[index]) - likely.log_sum)
        return self._taken(int(likely.tokens_K[index]))

    def _taken(self, token: int) -> int | None:
        self._produced += 1
        self._u = None
        self._counts[token] += 1
        if token in self._stop_ids:
            self.stopped_by = token
            return None
        return token

    def _sample(self, logits_V: np.ndarray) -> int:
        logits_V = logits_V.astype(np.float64)
        with np.errstate(over="ignore"):  # of a very low temperature: all but the most probable tokens get exp(-inf)
            probs_V = np.exp((logits_V - logits_V.max()) / self.sampling.temperature)
        probs_V /= probs_V.sum()
        # A large vocabulary takes milliseconds to sort, and almost none of its tokens has a chance to be drawn.
        for least in (LIKELY * probs_V.max(), 0.0):
            tokens = np.flatnonzero(probs_V >= least)
            tokens = tokens[np.argsort(-probs_V[tokens], kind="stable")]
            if (at := self._drawn(probs_V[tokens], is_all=len(tokens) == len(probs_V))) is not None:
                return int(tokens[at])
        raise ValueError("the logits of the next token are not finite numbers")

    def _drawn(self, probs_K: np.ndarray, *, is_all: bool) -> int | None:
        """Return the index of the token at the share `u` of the kept probability.

        The probabilities fall, and `is_all` if there are no others. None if others may be kept, and be the token.
        """
        sampling, count = self.sampling, len(probs_K)
        if self._u is None:
            self._u = self._rng.random()
        is_end = is_all  # whether what is kept ends within these
        if 0 < sampling.top_k <= count:
            count, is_end = sampling.top_k, True
        cumulative_K = np.cumsum(probs_K[:count])
        if sampling.top_p < 1:
            mass = cumulative_K[-1] if is_end else 1.0
            if (end := int(np.searchsorted(cumulative_K, sampling.top_p * mass)) + 1) <= count:
                count, is_end = end, True
        if (end := int(np.searchsorted(-probs_K[:count], -sampling.min_p * probs_K[0], side="right"))) < count:
            count, is_end = end, True
        if not is_end and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
            return None
        total = cumulative_K[count - 1] if is_end else 1.0
        at = int(np.searchsorted(cumulative_K[:count], self._u * total, side="right"))
        return min(at, count - 1) if is_end or at < count else None


def choose_all(choosers: Sequence[Chooser], logits: NextLogits) -> list[int | None]:
    """Return the next token for each row of the logits, of which each has its chooser; None where it ends."""
    likely = logits.likely(LIKELY_TOKENS, np.array([each.sampling.temperature or 1.0 for each in choosers], np.float32))
    indices = [chooser.index_among(row) for chooser, row in zip(choosers, likely, strict=True)]
    undecided = [i for i, index in enumerate(indices) if index is None]
    all_logits = dict(zip(undecided, logits.rows(undecided), strict=True)) if undecided else {}
    return [
        chooser(all_logits[i]) if index is None else chooser.take(row, index)
        for i, (chooser, row, index) in enumerate(zip(choosers, likely, indices, strict=True))
    ]
