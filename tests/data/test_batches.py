"""From documents to micro-batches: every document once, nothing too large, and the layout changes no number."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.data.batches import (
    MOST_PADDING,
    RowSizes,
    SequenceLayout,
    fill,
    level,
    micro_batches,
    pack,
    padded,
    plan,
    trimmed,
)
from dualtune.data.tokens.store import Document
from dualtune.engine.backend import IGNORE_INDEX

lengths_ = st.lists(st.integers(1, 60), min_size=1, max_size=40)
row_lengths = st.sampled_from([None, 60, 64, 100])


@dataclass
class Listed:
    """Documents in a list."""

    items: list[Document]
    hidden = beginnings = None
    shares = False

    @property
    def lengths(self):
        return np.array([len(document.tokens) for document in self.items])

    def __getitem__(self, index):
        return self.items[index]


def documents_of(lengths) -> Listed:
    """Documents with different tokens; the first token and every third one are no targets."""
    items = [Document(100 * i + np.arange(n, dtype=np.int32), np.arange(n) % 3 != 0) for i, n in enumerate(lengths)]
    return Listed(items)


def batches_of(lengths, ids=None, *, max_tokens=64, row_length=None, seed=1, step=3):
    ids = range(len(lengths)) if ids is None else ids
    return micro_batches(documents_of(lengths), ids, SequenceLayout(max_tokens, row_length), seed=seed, step=step)


def contents(batches) -> dict[int, dict]:
    """document -> its part of its row."""
    found = {}
    for batch in batches:
        for b in range(len(batch.tokens_BT)):
            for segment in range(1, batch.segments_BT[b].max() + 1):
                (where,) = np.nonzero(batch.segments_BT[b] == segment)
                assert np.array_equal(where, np.arange(where[0], where[-1] + 1)), "a document lies in one piece"
                cut = slice(where[0], where[-1] + 1)
                id = int(batch.tokens_BT[b, where[0]]) // 100
                assert id not in found, "a document comes once"
                found[id] = {
                    "tokens": batch.tokens_BT[b, cut].tolist(), "labels": batch.labels_BT[b, cut].tolist(),
                    "positions": batch.positions_BT[b, cut].tolist(), "seeds": batch.dropout_seeds_BT[b, cut].tolist(),
                }  # fmt: skip
    return found


@given(lengths_, st.integers(1, 300), row_lengths, st.data())
def test_every_document_is_in_one_micro_batch_and_none_is_too_large(lengths, max_tokens, row_length, data):
    ids = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    batches = batches_of(lengths, ids, max_tokens=max_tokens, row_length=row_length)
    assert contents(batches).keys() == set(ids)
    assert all(batch.tokens_BT.size <= max_tokens or len(batch.tokens_BT) == 1 for batch in batches)
    assert all(batch.tokens_BT.shape[1] % 16 == 0 for batch in batches)
    assert sum(batch.num_tokens for batch in batches) == sum(lengths[i] for i in ids)
    targets = sum(sum(t % 3 != 0 for t in range(1, lengths[i])) for i in ids)
    assert sum(batch.num_targets for batch in batches) == targets
    if row_length:
        assert all(batch.tokens_BT.shape[1] <= padded(row_length) for batch in batches)
        assert all((batch.segments_BT > 0).sum(1).max() <= row_length for batch in batches)


@given(lengths_, st.integers(1, 300), row_lengths)
def test_the_layout_changes_nothing_about_a_document(lengths, max_tokens, row_length):
    """Tokens, labels, positions and dropout keys are the same alone, padded and packed."""
    packed = contents(batches_of(lengths, max_tokens=max_tokens, row_length=row_length))
    for i in range(len(lengths)):
        assert packed[i] == contents(batches_of(lengths, [i]))[i]


def test_a_padded_batch_by_hand():
    documents = Listed([
        Document(np.array([7, 8, 9], np.int32), np.array([True, False, True])),
        Document(np.array([5, 6], np.int32), np.array([False, True])),
    ])  # fmt: skip
    (batch,) = micro_batches(documents, [1, 0], SequenceLayout(32), seed=1, step=0)
    pad, ignored = [0] * 13, [IGNORE_INDEX]
    assert batch.tokens_BT.tolist() == [[7, 8, 9, *pad], [5, 6, 0, *pad]]
    # The label of a token is the next token where that one is trained; nothing predicts the first token.
    assert batch.labels_BT.tolist() == [[IGNORE_INDEX, 9, *ignored * 14], [6, *ignored * 15]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, *pad], [1, 1, 0, *pad]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, *pad], [0, 1, 0, *pad]]
    assert {array.dtype.name for array in (batch.tokens_BT, batch.labels_BT, batch.segments_BT)} == {"int32"}
    assert batch.dropout_seeds_BT.dtype == np.uint32
    assert (batch.num_targets, batch.num_tokens) == (2, 5)


def test_a_packed_row_by_hand():
    documents = Listed([
        Document(np.array([5, 6], np.int32), np.array([False, True])),
        Document(np.array([7, 8, 9], np.int32), np.array([True, False, True])),
    ])  # fmt: skip
    (batch,) = micro_batches(documents, [0, 1], SequenceLayout(32, row_length=16), seed=1, step=0)
    pad = [0] * 11
    assert batch.tokens_BT.tolist() == [[7, 8, 9, 5, 6, *pad]]
    # No document predicts the first token of the next one, although that one is trained.
    assert batch.labels_BT.tolist() == [[IGNORE_INDEX, 9, IGNORE_INDEX, 6, *[IGNORE_INDEX] * 12]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, 2, 2, *pad]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, *pad]]


def test_the_longest_document_comes_first():
    assert [batch.tokens_BT.shape for batch in batches_of([3, 60, 20, 33])] == [(1, 64), (1, 48), (2, 32)]


def test_a_short_row_is_not_padded_to_a_long_one():
    lengths = np.array([1000, 990, 1000 - MOST_PADDING, 1000 - MOST_PADDING - 1])
    assert plan(RowSizes(lengths), range(4), SequenceLayout(100_000)) == [[[0], [1], [2]], [[3]]]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(60, 200))
def test_best_fit_decreasing_leaves_no_two_rows_that_would_fit_into_one(lengths, row_length):
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = pack(np.array(lengths), by_length, row_length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = sorted(sum(lengths[i] for i in row) for row in rows)
    assert used[-1] <= row_length
    assert len(used) < 2 or used[0] + used[1] > row_length


def test_a_document_goes_into_the_fullest_row_that_has_room():
    lengths = np.array([70, 60, 30, 40, 25])  # decreasing: 70, 60, then 40 beside 60, 30 beside 70, 25 alone
    assert pack(lengths, [0, 1, 3, 2, 4], 100) == [[0, 2], [1, 3], [4]]


def test_a_short_last_row_is_shared_out_if_that_saves_a_micro_batch():
    lengths = np.array([500, 400, 90, 300, 200])  # full rows: 990 and 500, too different for one micro-batch
    assert pack(lengths, [0, 1, 3, 4, 2], 1000) == [[0, 1, 2], [3, 4]]
    assert plan(RowSizes(lengths), range(5), SequenceLayout(2000, row_length=1000)) == [
        [[0, 4, 2], [1, 3]]
    ]  # 790 and 700
    # Where even rows save nothing, or would be too long, they stay as full as can be.
    assert plan(RowSizes(lengths), range(5), SequenceLayout(1000, row_length=1000)) == [[[0, 1, 2]], [[3, 4]]]
    assert plan(RowSizes(np.array([55, 45, 34, 33, 33])), range(5), SequenceLayout(300, row_length=100)) == [
        [[0, 1], [2, 3, 4]]
    ]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 9))
def test_even_rows_differ_by_no_more_than_a_document(lengths, num_rows):
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = level(np.array(lengths), by_length, num_rows)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert max(used) - min(used) <= max(lengths)


@given(st.integers(1, 200_000))
def test_widths_are_few_and_close(length):
    width = padded(length)
    assert width >= length and width % 16 == 0
    assert width - length < max(16, length / 8)


def test_there_are_at_most_eight_widths_for_every_doubling():
    assert len({padded(n) for n in range(1025, 2049)}) == 8
    assert len({padded(n) for n in range(1, 2049)}) == 16 + 3 * 8


@given(lengths_, st.sampled_from([None, 500]))
def test_trimmed_rows_hold_the_same_documents_in_the_fewest_granules(lengths, row_length):
    for batch in batches_of(lengths, max_tokens=2000, row_length=row_length):
        small = trimmed(batch)
        assert contents([small]) == contents([batch])
        used = int(np.count_nonzero(batch.segments_BT, axis=1).max())
        assert small.tokens_BT.shape == (len(batch.tokens_BT), -(-used // 16) * 16)
        assert small.documents == batch.documents and small.weights_BT is None


def test_the_fill_is_tokens_over_cells():
    lengths = np.array([10, 20, 30])
    assert fill(RowSizes(lengths), [[[2], [1]], [[0]]]) == pytest.approx(60 / (2 * 32 + 16))


# --- several processes ------------------------------------------------------------------------------------------------


def shares_of(lengths, size, *, max_tokens=64, row_length=None):
    """The micro-batches of each process."""
    documents, layout = documents_of(lengths), SequenceLayout(max_tokens, row_length)
    ids = range(len(lengths))
    return [micro_batches(documents, ids, layout, seed=1, step=3, rank=rank, size=size) for rank in range(size)]


@given(lengths_, st.integers(2, 5), row_lengths)
def test_processes_share_every_document_and_no_number_changes(lengths, size, row_length):
    shares = shares_of(lengths, size, row_length=row_length)
    assert len({len(batches) for batches in shares}) == 1, "all make the same number of exchanges"
    targets = sum(batch.num_targets for batches in shares for batch in batches)
    assert targets == sum(batch.num_targets for batch in batches_of(lengths))
    # Those with a target token: a filling micro-batch has none, and is a copy of a document that counts elsewhere.
    shown = [batch for batches in shares for batch in batches if batch.num_targets]
    alone = contents(batches_of(lengths))
    with_targets = {i: part for i, part in alone.items() if any(y != IGNORE_INDEX for y in part["labels"])}
    found = contents(shown)
    assert {i: part for i, part in found.items() if i in with_targets} == with_targets


@given(st.lists(st.integers(1, 60), min_size=12, max_size=40), st.integers(2, 4))
def test_processes_have_about_the_same_work(lengths, size):
    tokens = [sum(b.num_tokens for b in batches) for batches in shares_of(lengths, size, row_length=60)]
    assert max(tokens) - min(tokens) <= 60


def test_a_process_without_rows_computes_real_tokens_that_count_nothing():
    shares = shares_of([5, 9], 3)
    by_targets = sorted(shares, key=lambda batches: sum(batch.num_targets for batch in batches))
    assert [[batch.num_targets for batch in batches] for batches in by_targets] == [[0], [3], [6]]
    assert by_targets[0][0].num_tokens == 5


# --- dropout keys ----------------------------------------------------------------------------------------------------


def seeds(lengths, **options):
    return {i: part["seeds"] for i, part in contents(batches_of(lengths, **options)).items()}


@given(lengths_, st.data())
def test_noise_of_a_prefix_is_a_prefix_of_the_noise(lengths, data):
    """A document that is cut shorter keeps the keys of what remains."""
    shorter = [data.draw(st.integers(1, n)) for n in lengths]
    whole, cut = seeds(lengths), seeds(shorter)
    assert cut == {i: keys[: shorter[i]] for i, keys in whole.items()}


def test_noise_is_another_for_every_seed_step_and_document():
    variants = [seeds([8, 8]), seeds([8, 8], seed=2), seeds([8, 8], step=4)]
    assert len({tuple(keys) for variant in variants for keys in variant.values()}) == 6
