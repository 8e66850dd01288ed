"""Conformance: several texts continued together get the logits that each gets alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualtune.backend import IGNORE_INDEX, Batch, Engine
from dualtune.backend.decoding import NextLogits
from dualtune.testing import tolerances
from dualtune.testing.conformance_case import Case, random_adapter


def check_rows_together_compute_what_each_computes_alone(case: Case) -> None:
    """Texts of unlike lengths, an empty one among them; rows that enter late, leave in the middle and change place.

    With each of two adapters, one after another.
    """
    engine = case.engine()
    for seed in (3, 4):
        engine.load_adapter_state(random_adapter(engine.adapter_state(), seed))
        _check_together(engine, case.vocab)


def _check_together(engine: Engine, vocab: int) -> None:
    rng = np.random.default_rng(0)
    decoding, texts = engine.decoding(), list[np.ndarray]()

    def enter(*lengths: int) -> None:
        new = [rng.integers(3, vocab, n).astype(np.int32) for n in lengths]
        decoding.enter(new)
        texts.extend(new)

    def advance() -> None:
        tokens_B = rng.integers(3, vocab, len(texts)).astype(np.int32)
        texts[:] = [np.append(text, token) for text, token in zip(texts, tokens_B, strict=True)]
        _check_logits(engine, texts, decoding.advance(tokens_B))

    def leave(*staying: int) -> None:
        decoding.leave(staying)
        texts[:] = [texts[i] for i in staying]

    enter(4, 0, 9)
    advance()
    advance()
    enter(2)  # shorter than those that are there
    advance()
    leave(3, 1)  # without the longest: the padding is cut
    advance()
    enter(14, 1)  # longer
    advance()
    leave()
    enter(0)
    advance()


def _check_logits(engine: Engine, texts: Sequence[np.ndarray], found: NextLogits) -> None:
    logits_BV = found.rows().astype(np.float64)
    assert logits_BV.shape[0] == len(texts)
    assert (found.most_probable() == logits_BV.argmax(-1)).all()
    logprobs_BV = logits_BV - np.log(np.exp(logits_BV).sum(-1, keepdims=True))
    for text, logprobs_V in zip(texts, logprobs_BV, strict=True):
        gap = np.abs(logprobs_V - engine.logprobs(_alone(text))[0, -1]).max()
        assert gap <= tolerances.LOGPROBS, f"the log-probabilities of a row in a batch differ by {gap:.2e}"


def _alone(text: np.ndarray) -> Batch:
    tokens_BT = text[None]
    ones = np.ones_like(tokens_BT)
    return Batch(tokens_BT, ones * IGNORE_INDEX, ones, np.arange(len(text))[None], ones.astype(np.uint32))
