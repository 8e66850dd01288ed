"""Held-out rows: the share that was asked for, in rows and in tokens, and a remark where that cannot be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.data.documents import Data, held_out, held_out_tokens
from dualtune.data.tokens.tokenizer import Tokenizer


@pytest.fixture
def chatml(tiny_llama):
    return Tokenizer(tiny_llama)


@pytest.mark.parametrize(
    ("n", "share", "expected"), [(10, 0.2, 2), (10, 0.01, 1), (10, 0.99, 9), (1, 0.5, 0), (9, 0, 0)]
)
def test_the_split_is_as_large_as_asked(n, share, expected):
    assert held_out(n, share, seed=1).sum() == expected


def test_the_split_depends_on_seed_and_number_of_rows_alone():
    assert np.array_equal(held_out(50, 0.1, 7), held_out(50, 0.1, 7))
    assert not np.array_equal(held_out(50, 0.1, 7), held_out(50, 0.1, 8))


@given(st.lists(st.integers(80, 120), min_size=10, max_size=200), st.sampled_from([0.1, 0.2, 0.5]), st.integers(0, 99))
def test_rows_of_like_lengths_are_chosen_by_their_number(lengths, share, seed):
    chosen, remark = held_out_tokens(np.array(lengths), share, seed)
    assert np.array_equal(chosen, held_out(len(lengths), share, seed)) and not remark


@pytest.mark.parametrize("seed", range(20))
def test_a_long_row_among_short_ones_is_not_held_out_for_a_small_share(seed):
    tokens = np.array([5] * 9 + [100_000] + [400] * 500)  # 9 % of the rows would be a third of the tokens, or nothing
    chosen, remark = held_out_tokens(tokens, 0.1, seed)
    assert 0.05 <= tokens[chosen].sum() / tokens.sum() <= 0.2 and not remark


@given(st.lists(st.integers(0, 10**6), max_size=30), st.floats(0.01, 0.99), st.integers(0, 9))
def test_whatever_the_rows_are_some_are_left_and_a_share_that_is_missed_is_told(lengths, share, seed):
    tokens = np.array(lengths, np.int64)
    chosen, remark = held_out_tokens(tokens, share, seed)
    held = tokens[chosen].sum()
    if (tokens > 0).sum() >= 2:
        assert 0 < held < tokens.sum()
    if tokens.any():
        is_met = share / 2 <= held / tokens.sum() <= share * 2
        assert is_met == (not remark or "rows are held out to have" in remark)


def test_a_long_row_that_makes_the_share_take_half_of_the_rows_is_told(make_config, write_rows, chatml):
    rows = [{"text": "word " * 4000}, *({"text": f"{n} " * 20} for n in range(42))]
    train, eval_ = Data(make_config(write_rows(rows), {"data.eval": 0.1})).train_and_eval(chatml)
    assert eval_.num_rows > 2 * 0.1 * (eval_.num_rows + train.num_rows)
    told = f"{eval_.num_rows} of the 43 rows are held out to have 10% of the tokens (data.eval), because lengths differ"
    assert eval_.remark.startswith(told) and eval_.remark in eval_.summary()


def test_one_row_holds_nothing_out_and_says_so(make_config, write_rows, chatml):
    config = make_config(write_rows([{"text": "word " * 500}]), {"data.eval": 0.1})
    train, eval_ = Data(config).train_and_eval(chatml)
    assert len(train) > 1 and not len(eval_)
    assert eval_.remark.startswith("none: data.eval is 10% of the rows, but only one row can be trained on.")


def test_two_uneven_rows_are_split_and_the_share_is_reported(make_config, write_rows, chatml):
    config = make_config(write_rows([{"text": "long " * 90}, {"text": "short " * 60}]), {"data.eval": 0.1})
    train, eval_ = Data(config).train_and_eval(chatml)
    assert (train.num_rows, eval_.num_rows) == (1, 1) and eval_.num_tokens < train.num_tokens
    told = "44% of the tokens are held out, but data.eval is 10%: the least is one of the 2 rows. Add rows"
    assert told in eval_.summary()


@pytest.mark.parametrize(
    ("lengths", "advice"),
    [
        ([70] * 4, "the least is one of the 4 rows. Add rows, name evaluation data in data.eval, or set it to 0"),
        ([1] * 9 + [9000], "there are too few rows, and their lengths differ too much. Split the longest rows"),
    ],
)
def test_what_to_do_about_a_share_depends_on_number_and_lengths(lengths, advice):
    assert held_out_tokens(np.array(lengths), 0.1, 1)[1].endswith(f"data.eval is 10%: {advice}")


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25])
def test_of_plain_text_the_share_that_was_asked_for_is_held_out(make_config, shared, tmp_path, chatml, share):
    """A tenth of this file once held out 94 % of it: the blocks that were chosen had a mebibyte."""
    data = tmp_path / "train.txt"
    data.write_bytes(shared("data/misc/tinyshakespeare.txt").read_bytes()[:300_000])
    train, eval_ = Data(make_config(data, {"data.eval": share})).train_and_eval(chatml)
    assert eval_.num_tokens / (train.num_tokens + eval_.num_tokens) == pytest.approx(share, rel=0.35)
    assert not eval_.remark
