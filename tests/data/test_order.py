"""Steps: every document once an epoch, as often as its source weighs; nothing depends on what was asked before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.config import parse_config
from dualtune.data.order import Order

lengths_ = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def order_of(lengths, seed=1, sources=None, weights=(1.0,), **train) -> Order:
    overrides = [f"train.{key}={'null' if value is None else value}" for key, value in train.items()]
    text = "{model: {name: m}, data: {train: t}}"
    return Order(parse_config(text, overrides=[*overrides, f"run.seed={seed}"]), lengths, sources, weights)


def epochs_of(order: Order, num_epochs: int) -> list[list[np.ndarray]]:
    """The documents of each step, by epoch: the number before the step is done, rounded down."""
    epochs, step = [[] for _ in range(num_epochs)], 0
    while (epoch := int(order.step(step - 1).epoch) if step else 0) < num_epochs:
        epochs[epoch].append(order.step(step).documents)
        step += 1
        assert step < 10_000
    return epochs


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


@pytest.mark.parametrize("epochs", [0.5, 1, 3])
def test_a_small_data_set_has_a_hundred_steps_by_default(epochs):
    """A handful of updates taught nothing: 320 short rows were two steps an epoch."""
    lengths = np.random.default_rng(0).integers(20, 60, 320)
    order = order_of(lengths, epochs=epochs)
    assert 100 <= order.num_steps < 200
    assert order.tokens_per_step == int(epochs * lengths.sum() / 100)


def test_a_handful_of_documents_has_a_step_for_each():
    assert order_of([50] * 16, epochs=2).num_steps == 32


@pytest.mark.parametrize("train", [{"epochs": 3}, {"epochs": 1, "steps": 5}, {"epochs": 1, "documents_per_step": 4}])
def test_a_large_data_set_and_a_number_of_steps_keep_the_usual_tokens(train):
    lengths = [200] * (3000 if len(train) == 1 else 30)
    order, usual = order_of(lengths, **train), order_of(lengths, tokens_per_step=16384, **train)
    assert order.tokens_per_step == 16384 and order.num_steps == usual.num_steps
    assert all(np.array_equal(order.step(i).documents, usual.step(i).documents) for i in range(order.num_steps))


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


# --- weighted sources ------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([0.25, 0.5, 1, 1.5, 2, 3]))
def test_a_weight_is_how_often_a_source_comes_in_an_epoch(n, m, weight):
    """Over four epochs each document comes 4 × weight times, or once more or less where that is no whole number."""
    sources = np.array([0] * n + [1] * m)
    order = order_of([1] * (n + m), sources=sources, weights=(weight, 1.0), documents_per_step=5)
    taken = np.bincount(np.concatenate([step for epoch in epochs_of(order, 4) for step in epoch]), minlength=n + m)
    assert taken[n:].tolist() == [4] * m
    assert taken[:n].sum() == int(4 * weight * n)
    assert set(taken[:n]) <= {int(4 * weight), -int(-4 * weight // 1)}


def test_a_weight_below_one_goes_through_the_whole_source_before_anything_comes_again():
    order = order_of([1] * 12, sources=np.array([0] * 8 + [1] * 4), weights=(0.5, 1.0), documents_per_step=100)
    halves = [set(order.step(epoch).documents) - {8, 9, 10, 11} for epoch in range(4)]
    assert [len(half) for half in halves] == [4, 4, 4, 4]
    assert halves[0] | halves[1] == halves[2] | halves[3] == set(range(8))
    assert halves[0] != halves[2]  # another shuffle


def test_weights_of_one_change_nothing():
    plain = order_of([1] * 20, documents_per_step=3)
    weighted = order_of([1] * 20, sources=np.repeat([0, 1], 10), weights=(1.0, 1.0), documents_per_step=3)
    for i in range(14):
        assert plain.step(i).documents.tolist() == weighted.step(i).documents.tolist()


def test_two_threads_may_ask_at_once():
    from concurrent.futures import ThreadPoolExecutor

    lengths = list(range(1, 200))
    expected = [order_of(lengths, tokens_per_step=64).step(i).documents.tolist() for i in range(0, 900, 7)]
    order = order_of(lengths, tokens_per_step=64)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: order.step(i).documents.tolist(), range(0, 900, 7))) == expected


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=20), st.integers(1, 200))
def test_a_pair_counts_as_one_document_and_stays_together(pairs, tokens):
    lengths, config = (
        np.ravel(pairs),
        parse_config(f"{{model: {{name: m}}, data: {{train: t}}, train: {{tokens_per_step: {tokens}}}}}"),
    )
    paired, single = Order(config, lengths, answers=2), Order(config, [a + b for a, b in pairs])
    assert paired.num_steps == single.num_steps
    for step in range(paired.num_steps):
        documents = single.step(step).documents
        assert paired.step(step).documents.tolist() == [i for unit in documents for i in (2 * unit, 2 * unit + 1)]
