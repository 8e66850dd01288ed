"""Conformance: several texts continued together get the logits that each gets alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualtune.backend import IGNORE_INDEX, Batch, Engine
from dualtune.backend.decoding import NextLogits
from dualtune.testing import tolerances
from dualtune.testing.conformance_case import Case, random_adapter


def check_rows_together_compute_what_each_computes_alone(case: Case) -> None:
    """Texts of unlike lengths, down to one token; rows that enter late, leave in the middle and change place.

    With each of two adapters, one after another. The tokens that follow are arbitrary, and the most probable ones.
    """
    engine = case.engine()
    for seed in (3, 4):
        engine.load_adapter_state(random_adapter(engine.adapter_state(), seed))
        _check_together(engine, case.vocab)


def _check_together(engine: Engine, vocab: int) -> None:
    rng = np.random.default_rng(0)
    decoding, texts = engine.decoding(), list[np.ndarray]()

    most_probable_B = np.zeros(0, np.int32)  # of the rows that are there, where they are known

    def enter(*lengths: int) -> None:
        new = [rng.integers(3, vocab, n).astype(np.int32) for n in lengths]
        _check_logits(engine, new, decoding.enter(new))
        texts.extend(new)

    def advance() -> None:
        append(rng.integers(3, vocab, len(texts)).astype(np.int32))

    def go_on() -> None:
        """Append the most probable tokens, as an engine may expect it."""
        append(most_probable_B)

    def append(tokens_B: np.ndarray) -> None:
        nonlocal most_probable_B
        texts[:] = [np.append(text, token) for text, token in zip(texts, tokens_B, strict=True)]
        most_probable_B = _check_logits(engine, texts, decoding.advance(tokens_B))

    def leave(*staying: int) -> None:
        nonlocal most_probable_B
        decoding.leave(staying)
        texts[:] = [texts[i] for i in staying]
        most_probable_B = most_probable_B[list(staying)]

    enter(5, 1, 10)
    advance()
    go_on()
    go_on()
    advance()  # with other tokens than expected
    enter(3)  # shorter than those that are there
    advance()
    leave(3, 1)  # without the longest: the padding is cut
    go_on()
    enter(15, 2)  # longer
    advance()
    leave(0, 2, 3)
    advance()
    leave()
    enter(1)
    advance()
    go_on()


def _check_logits(engine: Engine, texts: Sequence[np.ndarray], found: NextLogits) -> np.ndarray:
    """Return the most probable tokens, int32 [B]."""
    logits_BV = found.rows().astype(np.float64)
    assert logits_BV.shape[0] == len(texts)
    most_probable_B = found.most_probable()
    assert (most_probable_B == logits_BV.argmax(-1)).all()
    logprobs_BV = logits_BV - np.log(np.exp(logits_BV).sum(-1, keepdims=True))
    for text, logprobs_V in zip(texts, logprobs_BV, strict=True):
        gap = np.abs(logprobs_V - engine.logprobs(_alone(text))[0, -1]).max()
        assert gap <= tolerances.LOGPROBS, f"the log-probabilities of a row in a batch differ by {gap:.2e}"
    return most_probable_B


def _alone(text: np.ndarray) -> Batch:
    tokens_BT = text[None]
    ones = np.ones_like(tokens_BT)
    return Batch(tokens_BT, ones * IGNORE_INDEX, ones, np.arange(len(text))[None], ones.astype(np.uint32))
