"""Choosing the next token, in NumPy, so that all backends draw the same tokens from the same logits.

What is random is a function of (seed, number of the prompt, number of the sample, position): one uniform number, the
share of the kept probability at which the token lies. The likely tokens come first, the most probable one at 0; the
others follow in the order of the vocabulary, unless some are left out for their probability.
Shape suffixes: B rows, K likely tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat, cast

import numpy as np

from dualtune.engine.decoding import LikelyRow, NextLogits, likely_rows

LOWEST = 1e-30  # temperature of a device, in float32
LIKELY_TOKENS = 256  # of each row, which leave the device; all do where these do not decide
UNDECIDED = -1  # in the place of a token
BLOCK = 1 << 18  # probabilities that are computed at once, if not of one row: 2 MiB


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
    tempered_logprobs: bool = False
    """Whether log-probabilities that are kept are those at the temperature: what is drawn from, before anything is left
    out. By default those of the model, and so of greedy answers."""


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
    one of which the continuation begins; the most probable tokens decide with which. `keeps_top`: how many of the most
    probable tokens in the place of each one are kept beside the log-probabilities, at most LIKELY_TOKENS.
    """

    def __init__(
        self, sampling: Sampling, stop_ids: frozenset[int], *, numbers: Sequence[int] = (),
        keeps_logprobs: bool = False, keeps_top: int = 0, penalties: Penalties | None = None,
        first: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        self.sampling, self._stop_ids = sampling, stop_ids
        self._penalties, self._begins = penalties, first
        self._counts: Counter[int] = Counter()  # how often a token was chosen
        # NumPy fills the seed up with zeros: the numbers (), (0,) and (0, 0) draw the same.
        self._rng = np.random.default_rng([sampling.seed, 3, *numbers])
        self._u: float | None = None  # drawn for the next token, which is not chosen yet
        self._produced = 0
        self.stopped_by: int | None = None  # the token that ended it
        # Of each token and of the one that ended it: log p, whatever was left out; see `Sampling.tempered_logprobs`.
        self.logprobs: list[float] | None = [] if keeps_logprobs else None
        self.top, self._keeps_top = list[tuple[np.ndarray, np.ndarray]](), keeps_top  # tokens and log p, [k] each

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one, and nothing else is asked for."""
        asks = self._penalties or self._begins or self._keeps_top or self.logprobs is not None
        return self.sampling.temperature == 0 and not asks

    def greedy(self, token: int) -> int | None:
        """Return the next token id, given the most probable one."""
        return self._taken(token, math.nan, None)

    def __call__(self, logits_V: np.ndarray) -> int | None:
        """Return the next token id for its logits, float32 [V]."""
        if self._produced == self.sampling.max_tokens:
            return None
        raw_V = logits_V
        if self._penalties:
            logits_V = self._penalties.applied(logits_V, self._counts)
        allowed = [text_ids[0] for text_ids in self._begins] if all(self._begins) else []  # one is whole: all is free
        if allowed:
            logits_V = np.where(np.isin(np.arange(len(logits_V)), allowed), logits_V, -np.inf)
        token = int(np.argmax(logits_V)) if self.sampling.temperature == 0 else self._sampled(logits_V)
        self._begins = [text_ids[1:] for text_ids in self._begins if text_ids[0] == token] if allowed else ()
        if self.logprobs is None and not self._keeps_top:
            return self._taken(token, math.nan, None)
        return self.take(likely_of(raw_V, self.sampling.temperature or 1.0), token, raw_V[token])

    def _sampled(self, logits_V: np.ndarray) -> int:
        likely = likely_of(logits_V, self.sampling.temperature)
        index = self._index_among(likely)
        return self._beyond(likely, logits_V) if index is None else int(likely.tokens_K[index])

    @property
    def draws_from_all(self) -> bool:
        """Whether the next token is drawn from all probabilities as they are."""
        is_free = not (self._leaves_out or self._penalties or self._begins)
        return is_free and self.sampling.temperature != 0 and self._produced < self.sampling.max_tokens

    @property
    def share(self) -> float:
        """The share of the probability at which the next token lies."""
        if self._u is None:
            self._u = self._rng.random()
        return self._u

    def among(self, likely: LikelyRow) -> int | None:
        """Return the next token id, or UNDECIDED: the likely tokens do not decide it, and `beyond` must be asked."""
        if self._produced == self.sampling.max_tokens:
            return None
        if self._penalties or self._begins:
            return UNDECIDED
        index = self._index_among(likely)
        return UNDECIDED if index is None else self.take(likely, int(likely.tokens_K[index]), likely.logits_K[index])

    def beyond(self, likely: LikelyRow, logits_V: np.ndarray) -> int | None:
        """Return the next token id, which the likely ones have not decided, by all logits, float32 [V]."""
        if self._penalties or self._begins:
            return self(logits_V)
        token = self._beyond(likely, logits_V)
        return self.take(likely, token, logits_V[token])

    def take(self, likely: LikelyRow, token: int, logit: SupportsFloat) -> int | None:
        """Take a token that was drawn, with this logit. Return it, or None if it ends the continuation."""
        return self._taken(token, float(likely.logprobs(np.asarray(logit), self._own_temperature)), likely)

    @property
    def _own_temperature(self) -> float | None:
        """The temperature of the log-probabilities that are kept; None: 1."""
        temperature = self.sampling.temperature
        return temperature if self.sampling.tempered_logprobs and temperature not in (0, 1) else None

    def _taken(self, token: int, logprob: float, likely: LikelyRow | None) -> int | None:
        self._produced += 1
        self._u = None
        self._counts[token] += 1
        if self.logprobs is not None:
            self.logprobs.append(logprob)
        if likely is not None and self._keeps_top:
            most = slice(self._keeps_top)
            logprobs_k = likely.logprobs(likely.logits_K[most], self._own_temperature)
            self.top.append((likely.tokens_K[most], logprobs_k.astype(np.float32)))
        if token in self._stop_ids:
            self.stopped_by = token
            return None
        return token

    @property
    def _leaves_out(self) -> bool:
        return self.sampling.top_p < 1 or self.sampling.top_k > 0 or self.sampling.min_p > 0

    def _index_among(self, likely: LikelyRow) -> int | None:
        """Return the index of the next token among the likely ones. None if it may be another."""
        if self.sampling.temperature == 0:
            return 0
        return self._drawn(self._probabilities(likely.logits_K, likely), self.share, is_all=False)

    def _probabilities(self, logits: np.ndarray, likely: LikelyRow) -> np.ndarray:
        """Return the probabilities of tokens before any is left out, float64."""
        return _probabilities([(self, likely)], logits[None])[0]

    def _beyond(self, likely: LikelyRow, logits_V: np.ndarray) -> int:
        """Return the next token id where the likely ones do not decide it."""
        probs_V, u = self._probabilities(logits_V, likely), self.share
        if self._leaves_out:  # which ones is known when all are sorted, which takes long
            order = np.argsort(-probs_V, kind="stable")
            return int(order[cast(int, self._drawn(probs_V[order], u, is_all=True))])
        return _places_beyond(probs_V[None], likely.tokens_K[None], np.array([u]))[0]

    def _drawn(self, probs_K: np.ndarray, u: float, *, is_all: bool) -> int | None:
        """Return the index of the token at the share `u` of the kept probability.

        The probabilities fall, and `is_all` if there are no others. None if others may be kept, and be the token.
        """
        sampling, count = self.sampling, len(probs_K)
        is_end = is_all  # whether the tokens that stay end within these
        if 0 < sampling.top_k <= count:
            count, is_end = sampling.top_k, True
        cumulative_K = np.cumsum(probs_K[:count])
        if sampling.top_p < 1:
            mass = float(cumulative_K[-1]) if is_end else 1.0
            if (end := int(np.searchsorted(cumulative_K, sampling.top_p * mass)) + 1) <= count:
                count, is_end = end, True
        least = sampling.min_p * float(probs_K[0])
        if least and (end := int(np.searchsorted(-probs_K[:count], -least, side="right"))) < count:
            count, is_end = end, True
        if not is_end and self._leaves_out:
            return None
        total = cumulative_K[count - 1] if is_end else 1.0
        at = int(np.searchsorted(cumulative_K[:count], u * total, side="right"))
        return min(at, count - 1) if is_end or at < count else None


def likely_of(logits_V: np.ndarray, temperature: float) -> LikelyRow:
    """Return the likely tokens of logits float32 [V], or all of a small vocabulary."""
    tokens = np.arange(len(logits_V), dtype=np.int32)
    if len(tokens) > LIKELY_TOKENS:
        tokens = np.argpartition(-logits_V, LIKELY_TOKENS)[:LIKELY_TOKENS].astype(np.int32)
    exact_V = logits_V.astype(np.float64)
    log_sum = _log_sum(exact_V)
    tempered_sum = np.log(_unnormalized(exact_V, float(exact_V.max()), temperature).sum())
    (row,) = likely_rows(tokens[None], logits_V[tokens][None], np.array([log_sum]), np.array([tempered_sum]))
    return row


def _log_sum(logits_V: np.ndarray) -> float:
    largest = logits_V.max()
    return float(largest + np.log(np.exp(logits_V - largest).sum()))


def _unnormalized(logits: np.ndarray, largest: float | np.ndarray, temperature: float | np.ndarray) -> np.ndarray:
    """Return probabilities but for a factor, float64."""
    with np.errstate(over="ignore"):  # of a very low temperature: all but the most probable tokens get exp(-inf)
        return np.exp((logits.astype(np.float64) - largest) / temperature)


def choose_all(choosers: Sequence[Chooser], logits: NextLogits) -> list[int | None]:
    """Return the next token for each row of the logits, by its chooser; None where the row ends."""
    temperatures = [each.sampling.temperature or 1.0 for each in choosers]
    likely = logits.likely(LIKELY_TOKENS, np.maximum(temperatures, LOWEST).astype(np.float32))
    rows = [*zip(choosers, likely, strict=True)]
    # Rows that draw from all tokens are drawn together: one by one, NumPy takes longer to begin than to compute.
    together = [i for i, chooser in enumerate(choosers) if chooser.draws_from_all]
    chosen = dict(zip(together, _drawn_among([rows[i] for i in together]), strict=True))
    alone = [i for i in range(len(rows)) if i not in chosen]
    chosen |= {i: choosers[i].among(likely[i]) for i in alone}
    undecided = [i for i in (*together, *alone) if chosen[i] == UNDECIDED]
    if undecided:  # all logits of these rows leave the device together
        logits_UV, count = logits.rows(undecided), sum(chosen[i] == UNDECIDED for i in together)
        step = max(1, BLOCK // logits_UV.shape[1])
        for begin in range(0, count, step):
            part = undecided[begin : min(begin + step, count)]
            tokens = _drawn_beyond([rows[i] for i in part], logits_UV[begin : begin + len(part)])
            chosen |= dict(zip(part, tokens, strict=True))
        for i, logits_V in zip(undecided[count:], logits_UV[count:], strict=True):
            chosen[i] = choosers[i].beyond(likely[i], logits_V)
    return [chosen[i] for i in range(len(rows))]


Rows = Sequence[tuple[Chooser, LikelyRow]]


def _drawn_among(rows: Rows) -> list[int | None]:
    """Return what `Chooser.among` returns of each row."""
    if not rows:
        return []
    ends_BK = np.cumsum(_probabilities(rows, np.stack([row.logits_K for _, row in rows])), axis=-1)
    places_B = (ends_BK <= _shares(rows)[:, None]).sum(-1).tolist()
    return [
        chooser.take(row, int(row.tokens_K[place]), row.logits_K[place]) if place < len(row.tokens_K) else UNDECIDED
        for (chooser, row), place in zip(rows, places_B, strict=True)
    ]


def _drawn_beyond(rows: Rows, logits_BV: np.ndarray) -> list[int | None]:
    """Return what `Chooser.beyond` returns of each row."""
    tokens_BK = np.stack([row.tokens_K for _, row in rows])
    tokens_B = _places_beyond(_probabilities(rows, logits_BV), tokens_BK, _shares(rows))
    return [
        chooser.take(row, token, logits_V[token])
        for (chooser, row), token, logits_V in zip(rows, tokens_B, logits_BV, strict=True)
    ]


def _places_beyond(probs_BV: np.ndarray, tokens_BK: np.ndarray, shares_B: np.ndarray) -> list[int]:
    """Return the token of each row at a share of the probability, of which that of the likely tokens comes first."""
    masses_B = np.take_along_axis(probs_BV, tokens_BK, -1).sum(-1)
    np.put_along_axis(probs_BV, tokens_BK, 0, -1)
    ends_BV = np.cumsum(probs_BV, axis=-1, out=probs_BV)
    places_B = (ends_BV <= (shares_B * (masses_B + ends_BV[:, -1]) - masses_B)[:, None]).sum(-1)
    return np.where(places_B < ends_BV.shape[1], places_B, tokens_BK[:, -1]).tolist()


def _shares(rows: Rows) -> np.ndarray:
    return np.array([chooser.share for chooser, _ in rows])


def _probabilities(rows: Rows, logits_BX: np.ndarray) -> np.ndarray:
    """Return the probabilities of tokens of each row, float64."""
    largest_B1 = np.array([[float(row.logits_K[0])] for _, row in rows])
    temperatures_B1 = np.array([[chooser.sampling.temperature] for chooser, _ in rows])
    factors_B1 = np.array([[math.exp(-row.tempered_sum)] for _, row in rows])
    return _unnormalized(logits_BX, largest_B1, temperatures_B1) * factors_B1
