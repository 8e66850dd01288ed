"""Answers that begin with the same tokens: what of them is common, and the rows in which it is computed once."""

import numpy as np
import pytest

from dualtune.data.batches import SequenceLayout, make_batch, micro_batches, plan, sizes_of
from dualtune.data.documents import units_in_memory
from dualtune.data.tokens.store import common_beginning
from dualtune.engine.backend import IGNORE_INDEX
from dualtune.engine.documents import Branch, branches_of


def answer(tokens, first_target):
    return np.array(tokens, np.int32), np.arange(len(tokens)) >= first_target


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        (answer([5, 6, 7, 8], 3), answer([5, 6, 7, 9, 1], 3), 2),  # the last token of the prompt predicts 8, or 9
        (answer([5, 6, 7, 8], 3), answer([5, 6, 4, 8], 3), 1),  # texts that differ in the prompt
        (answer([5, 6, 7, 8], 2), answer([5, 6, 7, 8], 3), 1),  # no token before a target of either
        (answer([5, 6, 7], 1), answer([5, 6, 8], 1), 0),
        (answer([5, 6], 1), answer([4, 6], 1), 0),
        (answer([5, 6, 7, 8], 0), answer([5, 6, 7, 9], 0), 0),
    ],
)
def test_what_two_answers_have_in_common(first, other, expected):
    assert common_beginning(first, other) == expected == common_beginning(other, first)
    assert units_in_memory([[first, other]]).beginnings.tolist() == [0, expected]


PROMPT = [11, 12, 13, 14]
PAIRS = [
    [answer([*PROMPT, 1, 2], 4), answer([*PROMPT, 3], 4)],
    [answer([9, 1], 1), answer([9, 2, 3], 1)],  # nothing in common that could be computed once
]


@pytest.fixture
def pairs():
    documents = units_in_memory(PAIRS)
    documents.shares = True
    return documents


def test_a_row_has_the_prompt_once(pairs):
    batch = make_batch(pairs, [[0, 1, 2, 3]], seed=1, step=2)
    width = 6 + 2 + 2 + 3
    assert batch.tokens_BT[0, :width].tolist() == [*PROMPT, 1, 2, 14, 3, 9, 1, 9, 2, 3]
    assert batch.positions_BT[0, :width].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 0, 1, 2]
    assert batch.segments_BT[0, :width].tolist() == [1] * 6 + [2] * 2 + [3] * 2 + [4] * 3
    assert batch.parents_BT[0].nonzero()[0].tolist() == [6, 7] and batch.parents_BT.max() == 1
    targets = {t: int(label) for t, label in enumerate(batch.labels_BT[0]) if label != IGNORE_INDEX}
    assert targets == {3: 1, 4: 2, 6: 3, 8: 1, 10: 2, 11: 3}
    assert branches_of(batch) == [Branch(0, 6, 8, 0, 3)]
    assert (batch.num_tokens, batch.num_computed, batch.documents) == (16, 13, ((0, 1, 2, 3),))


def test_without_sharing_no_token_has_a_parent_and_dropout_is_the_same(pairs):
    once = make_batch(pairs, [[0, 1]], seed=1, step=2)
    pairs.shares = False
    twice = make_batch(pairs, [[0, 1]], seed=1, step=2)
    assert twice.parents_BT is None and twice.num_tokens == twice.num_computed == 11
    whole = twice.dropout_seeds_BT[0]
    assert np.array_equal(whole[:3], whole[6:9]) and len({*whole[:6], *whole[9:11]}) == 8
    assert np.array_equal(once.dropout_seeds_BT[0, :8], np.delete(whole, [6, 7, 8])[:8])


def test_answers_share_a_row_if_they_fit_into_a_micro_batch(pairs):
    assert plan(sizes_of(pairs), range(4), SequenceLayout(64, 6)) == [[[0, 1], [3, 2]]]  # 8 tokens, more than a row
    assert plan(sizes_of(pairs), range(2), SequenceLayout(7, 6)) == [[[0]], [[1]]]
    batches = micro_batches(pairs, range(4), SequenceLayout(7, 6), seed=0, step=0)
    assert all(batch.parents_BT is None for batch in batches)
    shares = [micro_batches(pairs, range(4), SequenceLayout(64, 6), seed=0, step=0, rank=r, size=2) for r in (0, 1)]
    assert sorted(batch.documents for (batch,) in shares) == [((0, 1),), ((3, 2),)]


def test_hidden_states_of_the_prompt_are_read_once(pairs):
    pairs.hidden = [np.full((length, 2), 10 * i + np.arange(length)[:, None]) for i, length in enumerate(pairs.lengths)]
    batch = make_batch(pairs, [[0, 1]], seed=0, step=0)
    assert batch.hidden_BTD[0, :8, 0].tolist() == [0, 1, 2, 3, 4, 5, 13, 14]
