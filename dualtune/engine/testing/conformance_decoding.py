"""The conformance checks of texts continued together: each gets the logits that it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dualtune.engine.adapter_bank import NO_ADAPTER, AdapterBank
from dualtune.engine.backend import IGNORE_INDEX, Batch, Engine
from dualtune.engine.decoding import NextLogits
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance_case import Case, random_adapter
from dualtune.model.adapter import AdapterSpec, Tensors, modules_of


def check_rows_together_compute_what_each_computes_alone(case: Case) -> None:
    """Texts of unlike lengths, down to one token; rows that enter late, leave in the middle and change place.

    With each of two adapters, one after another. The tokens that follow are arbitrary, and the most probable ones.
    """
    engine = case.engine()
    for seed in (3, 4):
        engine.load_adapter_state(random_adapter(engine.adapter_state(), seed))
        _check_together(engine, case.vocab, [engine])


def check_rows_of_several_adapters_compute_what_each_computes_with_its_own(case: Case) -> None:
    """The same with an adapter for each row, or none: of unlike ranks, scales and layers, output head included.

    In engines with other adapters of their own, which take no part and are there again afterwards.
    """
    modules = modules_of(case.engine().adapter_state())
    head = case.tables[1]
    changes: list[dict[str, Any]] = [
        {}, {"rank": 2, "alpha": 7.0, "targets": tuple(modules[::2])}, {"rank": 1, "targets": (head,)},
        {"alpha_pattern": ((modules[-1], 3.0),), "scaling": "rank_stabilized"},
    ]  # fmt: skip
    each, adapters = list[Engine](), list[tuple[AdapterSpec, Tensors]]()
    for seed, changed in enumerate(changes, start=3):
        each.append(case.engine(**changed))
        adapters.append((replace(case.spec, **changed), random_adapter(each[-1].adapter_state(), seed)))
        each[-1].load_adapter_state(adapters[-1][1])
    base, batch = case.engine(trained=False), case.batch()
    # An engine that adapts more layers than the bank, and one that adapts fewer.
    for engine, numbers in ((each[0], (1, 2)), (each[2], range(len(each)))):
        before = engine.logprobs(batch)
        bank = AdapterBank([adapters[i] for i in numbers])
        _check_together(engine, case.vocab, [*(each[i] for i in numbers), base], bank)
        _check_scores(engine, case.vocab, [*(each[i] for i in numbers), base], bank)
        assert np.array_equal(engine.logprobs(batch), before)


def _check_together(engine: Engine, vocab: int, each: Sequence[Engine], bank: AdapterBank | None = None) -> None:
    """`each`: engines that compute with the adapters of the bank, by their numbers, and the last one with none."""
    rng = np.random.default_rng(0)
    decoding = engine.decoding() if bank is None else engine.decoding(bank)
    texts, alone = list[np.ndarray](), list[Engine]()  # of each row
    most_probable_B = np.zeros(0, np.int32)  # of the rows that are there, where they are known

    def enter(*lengths: int, text_of: Sequence[int] | None = None) -> None:
        new = [rng.integers(3, vocab, n).astype(np.int32) for n in lengths]
        numbers: list[int] = rng.integers(NO_ADAPTER, 0 if bank is None else len(bank), len(new)).tolist()
        rows = range(len(new)) if text_of is None else text_of
        entered, engines = [new[i] for i in rows], [each[numbers[i]] for i in rows]
        _check_logits(engines, entered, decoding.enter(new, text_of, adapters=None if bank is None else numbers))
        texts.extend(entered)
        alone.extend(engines)

    def advance() -> None:
        append(rng.integers(3, vocab, len(texts)).astype(np.int32))

    def go_on() -> None:
        """Append the most probable tokens, as an engine may expect it."""
        append(most_probable_B)

    def append(tokens_B: np.ndarray) -> None:
        nonlocal most_probable_B
        texts[:] = [np.append(text, token) for text, token in zip(texts, tokens_B, strict=True)]
        most_probable_B = _check_logits(alone, texts, decoding.advance(tokens_B))

    def leave(*staying: int) -> None:
        nonlocal most_probable_B
        decoding.leave(staying)
        texts[:] = [texts[i] for i in staying]
        alone[:] = [alone[i] for i in staying]
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
    enter(3, 7, text_of=(0, 1, 1, 0, 1))
    advance()
    go_on()
    enter(9, text_of=(0, 0))
    advance()
    leave(5, 1, 2)
    go_on()


def _check_scores(engine: Engine, vocab: int, each: Sequence[Engine], bank: AdapterBank) -> None:
    """Log-probabilities of given tokens, and of the most probable ones, of texts that each adapter has in a batch."""
    rng, numbers = np.random.default_rng(1), [*range(len(bank)), NO_ADAPTER, 0]
    lengths: list[int] = rng.integers(2, 12, len(numbers)).tolist()
    texts = [rng.integers(3, vocab, n).astype(np.int32) for n in lengths]
    batch, kept = _scored(texts), engine.decoding(bank)  # which has the same numbers on the device
    with engine.scoring(bank, numbers):
        found, tops = engine.target_logprobs(batch)[batch.is_target_BT], engine.top_logprobs(batch, 3)[1]
    own = [(each[number], _scored([text])) for number, text in zip(numbers, texts, strict=True)]
    expected = np.concatenate([alone.target_logprobs(one)[one.is_target_BT] for alone, one in own])
    expected_tops = np.concatenate([alone.top_logprobs(one, 3)[1] for alone, one in own])
    for name, gap in (("given", np.abs(found - expected).max()), ("top", np.abs(tops - expected_tops).max())):
        assert gap <= tolerances.LOGPROBS, f"the log-probabilities of {name} tokens in a batch differ by {gap:.2e}"
    del kept


def _scored(texts: Sequence[np.ndarray]) -> Batch:
    """Return a batch with a row for each text; each token but the first is a target."""
    shape = len(texts), max(map(len, texts))
    tokens_BT, labels_BT, segments_BT = np.zeros(shape, np.int32), np.full(shape, IGNORE_INDEX), np.zeros(shape, int)
    for b, text in enumerate(texts):
        tokens_BT[b, : len(text)], labels_BT[b, : len(text) - 1], segments_BT[b, : len(text)] = text, text[1:], 1
    positions_BT = np.arange(shape[1]) * segments_BT
    return Batch(tokens_BT, labels_BT, segments_BT, positions_BT, np.ones(shape, np.uint32))


def _check_logits(alone: Sequence[Engine], texts: Sequence[np.ndarray], logits: NextLogits) -> np.ndarray:
    """Return the most probable tokens, int32 [B]."""
    logits_BV = logits.rows().astype(np.float64)
    assert logits_BV.shape[0] == len(texts)
    most_probable_B = logits.most_probable()
    assert (most_probable_B == logits_BV.argmax(-1)).all()
    logprobs_BV = logits_BV - np.log(np.exp(logits_BV).sum(-1, keepdims=True))
    for engine, text, logprobs_V in zip(alone, texts, logprobs_BV, strict=True):
        gap = np.abs(logprobs_V - engine.logprobs(_alone(text))[0, -1]).max()
        assert gap <= tolerances.LOGPROBS, f"the log-probabilities of a row in a batch differ by {gap:.2e}"
    return most_probable_B


def _alone(text: np.ndarray) -> Batch:
    tokens_BT = text[None]
    ones = np.ones_like(tokens_BT)
    return Batch(tokens_BT, ones * IGNORE_INDEX, ones, np.arange(len(text))[None], ones.astype(np.uint32))
