"""Steps and micro-batches: every document once an epoch, nothing depends on what was asked before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.backend import IGNORE_INDEX
from dualtune.config import parse_config
from dualtune.data.documents import Document
from dualtune.data.order import Order, micro_batches

lengths_ = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def order_of(lengths, seed=1, **train) -> Order:
    overrides = [f"train.{key}={'null' if value is None else value}" for key, value in train.items()]
    text = "{model: {name: m}, data: {train: t}}"
    return Order(parse_config(text, overrides=[*overrides, f"run.seed={seed}"]), lengths)


def documents_of(lengths) -> list[Document]:
    """Documents with different tokens; the first token and every third one are no targets."""
    return [Document(100 * i + np.arange(n, dtype=np.int32), np.arange(n) % 3 != 0) for i, n in enumerate(lengths)]


def epochs_of(order: Order, num_epochs: int) -> list[list[np.ndarray]]:
    """The documents of each step, by epoch: the number before the step is done, rounded down."""
    epochs, step = [[] for _ in range(num_epochs)], 0
    while (epoch := int(order.step(step - 1).epoch) if step else 0) < num_epochs:
        epochs[epoch].append(order.step(step).documents)
        step += 1
        assert step < 10_000
    return epochs


# --- steps -----------------------------------------------------------------------------------------------------------


@given(lengths_, st.integers(1, 100), st.integers(1, 9) | st.none())
def test_every_document_comes_exactly_once_an_epoch(lengths, tokens, documents):
    order = order_of(lengths, tokens_per_step=tokens, documents_per_step=documents)
    for epoch in epochs_of(order, 3):
        assert sorted(np.concatenate(epoch)) == list(range(len(lengths)))


@given(lengths_, st.integers(1, 100))
def test_a_step_holds_as_many_tokens_as_fit_and_at_least_one_document(lengths, tokens):
    for epoch in epochs_of(order_of(lengths, tokens_per_step=tokens), 2):
        sums = [sum(lengths[i] for i in step) for step in epoch]
        assert all(total <= tokens or len(step) == 1 for total, step in zip(sums, epoch, strict=True))
        following = [lengths[step[0]] for step in epoch[1:]]
        assert all(total + more > tokens for total, more in zip(sums, following, strict=False))


def test_documents_per_step_wins_over_tokens_and_the_last_step_is_smaller():
    order = order_of([50] * 10, tokens_per_step=1, documents_per_step=4)
    assert [len(order.step(i).documents) for i in range(6)] == [4, 4, 2, 4, 4, 2]


def test_every_epoch_and_every_seed_has_another_permutation():
    runs = [np.concatenate(e) for seed in (1, 2) for e in epochs_of(order_of([1] * 50, seed, documents_per_step=8), 3)]
    assert len({tuple(run) for run in runs}) == 6


@given(lengths_, st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_step_is_the_same_in_whatever_order_it_is_asked_for(lengths, asked):
    options = {"tokens_per_step": 64, "epochs": 0.5}
    forward, order = order_of(lengths, **options), order_of(lengths, **options)
    expected = [forward.step(i) for i in range(51)]
    for i in asked:
        assert order.step(i).documents.tolist() == expected[i].documents.tolist()
        assert order.step(i).epoch == expected[i].epoch


def test_the_epoch_counts_documents_done():
    order = order_of([1] * 10, documents_per_step=4)
    assert [order.step(i).epoch for i in range(6)] == pytest.approx([0.4, 0.8, 1.0, 1.4, 1.8, 2.0])


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"epochs": 3}, 9),
        ({"epochs": 1}, 3),
        ({"epochs": 0.5}, 2),  # 1.5 steps, rounded to an even number
        ({"epochs": 1.34}, 4),
        ({"epochs": 2.7}, 8),
        ({"epochs": 0.001}, 1),
        ({"epochs": 3, "steps": 7}, 7),
        ({"epochs": 1, "steps": 700}, 700),
    ],
)
def test_the_number_of_steps(train, expected):
    assert order_of([1] * 10, documents_per_step=4, **train).num_steps == expected


def test_epochs_of_unequal_numbers_of_steps_are_all_counted():
    lengths = [60, 5, 5, 40, 30, 20, 10]
    order = order_of(lengths, tokens_per_step=64, epochs=5)
    assert order.num_steps == sum(map(len, epochs_of(order, 5)))
    assert order.step(order.num_steps - 1).epoch == 5


# --- micro-batches ---------------------------------------------------------------------------------------------------


def rows_of(batches) -> dict[int, dict]:
    """document -> its row, without padding."""
    rows = {}
    for batch in batches:
        for b in range(len(batch.tokens_BT)):
            n = int(batch.segments_BT[b].sum())
            rows[int(batch.tokens_BT[b, 0]) // 100] = {
                "tokens": batch.tokens_BT[b, :n], "labels": batch.labels_BT[b, :n],
                "positions": batch.positions_BT[b, :n], "noise": batch.noise_BT[b, :n],
            }  # fmt: skip
    return rows


@given(lengths_, st.integers(1, 300), st.data())
def test_every_document_is_in_one_micro_batch_and_none_is_too_large(lengths, max_tokens, data):
    ids = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    batches = micro_batches(documents_of(lengths), ids, max_tokens=max_tokens, seed=1, step=0)
    assert sum(len(batch.tokens_BT) for batch in batches) == len(ids)
    assert rows_of(batches).keys() == set(ids)
    assert all(batch.tokens_BT.size <= max_tokens or len(batch.tokens_BT) == 1 for batch in batches)
    assert all(batch.tokens_BT.shape[1] % 16 == 0 for batch in batches)
    assert sum(batch.num_tokens for batch in batches) == sum(lengths[i] for i in ids)
    targets = sum(sum(t % 3 != 0 for t in range(1, lengths[i])) for i in ids)
    assert sum(batch.num_targets for batch in batches) == targets


def test_a_row_by_hand():
    documents = [
        Document(np.array([7, 8, 9], np.int32), np.array([True, False, True])),
        Document(np.array([5, 6], np.int32), np.array([False, True])),
    ]
    (batch,) = micro_batches(documents, [1, 0], max_tokens=32, seed=1, step=0)
    pad, ignored = [0] * 13, [IGNORE_INDEX]
    assert batch.tokens_BT.tolist() == [[7, 8, 9, *pad], [5, 6, 0, *pad]]
    # The label of a token is the next token where that one is trained; nothing predicts the first token.
    assert batch.labels_BT.tolist() == [[IGNORE_INDEX, 9, *ignored * 14], [6, *ignored * 15]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, *pad], [1, 1, 0, *pad]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, *pad], [0, 1, 0, *pad]]
    assert {array.dtype.name for array in (batch.tokens_BT, batch.labels_BT, batch.segments_BT)} == {"int32"}
    assert batch.noise_BT.dtype == np.uint32
    assert (batch.num_targets, batch.num_tokens) == (2, 5)


def test_the_longest_document_comes_first():
    batches = micro_batches(documents_of([3, 60, 20, 33]), range(4), max_tokens=64, seed=1, step=0)
    assert [batch.tokens_BT.shape for batch in batches] == [(1, 64), (1, 48), (2, 32)]


def noise(lengths, ids=None, *, max_tokens=64, seed=1, step=3):
    ids = range(len(lengths)) if ids is None else ids
    batches = micro_batches(documents_of(lengths), ids, max_tokens=max_tokens, seed=seed, step=step)
    return {i: row["noise"].tolist() for i, row in rows_of(batches).items()}


@given(lengths_, st.integers(1, 500))
def test_noise_does_not_depend_on_the_micro_batch(lengths, max_tokens):
    assert noise(lengths) == noise(lengths, max_tokens=max_tokens)
    half = range(0, len(lengths), 2)
    assert noise(lengths, half) == {i: keys for i, keys in noise(lengths).items() if i in half}


@given(lengths_, st.data())
def test_noise_of_a_prefix_is_a_prefix_of_the_noise(lengths, data):
    """A document that is cut shorter keeps the keys of what remains."""
    shorter = [data.draw(st.integers(1, n)) for n in lengths]
    whole, cut = noise(lengths), noise(shorter)
    assert cut == {i: keys[: shorter[i]] for i, keys in whole.items()}


def test_noise_is_another_for_every_seed_step_and_document():
    variants = [noise([8, 8]), noise([8, 8], seed=2), noise([8, 8], step=4)]
    assert len({tuple(keys) for variant in variants for keys in variant.values()}) == 6
