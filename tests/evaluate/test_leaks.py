"""Held-out rows in the training data: exactly, nearly, and not at all."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example
from dualtune.data.similarity import NEAR, SHINGLE, jaccard, shingles
from dualtune.use.scoring.compare import Leaks, find_leaks


def plain(texts, path="f"):
    return [Example(path, i, prompt="", completion=text) for i, text in enumerate(texts, start=1)]


def sentence(seed, words=60):
    return " ".join("".join(random.Random(f"{seed}{i}").choices("abcdefghij", k=6)) for i in range(words))


def edited(text, words):
    """The text with its first words replaced."""
    rest = text.split()[words:]
    return " ".join(["zzzzzz"] * words + rest)


def test_exact_near_and_different_rows():
    held_out = plain([sentence(1), sentence(2), sentence(3), sentence(4)], "eval")
    training = plain([sentence(9), edited(sentence(2), 3), sentence(1), edited(sentence(3), 30)], "train")
    assert find_leaks(held_out, training) == Leaks(4, exact=1, near=1, first=("eval:1", "train:3"))
    assert find_leaks(held_out, training[3:]) == Leaks(4, 0, 0, None)
    assert find_leaks([], training) == Leaks(0, 0, 0, None)


def test_case_and_spaces_make_a_row_near_and_not_exact():
    text = sentence(1)
    assert find_leaks(plain([text]), plain([text.upper().replace(" ", " \n")])) == Leaks(1, 0, 1, ("f:1", "f:1"))


def test_a_shared_system_message_does_not_make_rows_alike():
    def chat(line, answer):
        turns = (Message("system", sentence("s", 500)), Message("user", answer), Message("assistant", answer))
        return Example("f", line, turns)

    assert find_leaks([chat(1, sentence(1))], [chat(2, sentence(2))]).near == 0
    assert find_leaks([chat(1, sentence(1))], [chat(2, sentence(1))]).exact == 1


def test_near_is_a_threshold_that_candidates_do_not_decide():
    """Around 0.8, every pair on the right side is found and none on the wrong one."""
    held_out, training, truth = [], [], 0
    for i in range(60):
        text = sentence(i)
        held_out.append(text)
        training.append(edited(text, i % 15))
        truth += jaccard(shingles(text), shingles(training[-1])) >= NEAR
    found = find_leaks(plain(held_out), plain(training))
    assert 20 < truth < 50 and found.exact + found.near == truth


def test_texts_of_any_alphabet_and_any_length():
    texts = ["", "a", "日本語のテキスト", "\ud800 half a pair", "👩‍👩‍👧" * 3]
    assert find_leaks(plain(texts), plain(texts)).exact == 5
    assert len(shingles("ab")) == 1 and not np.array_equal(shingles("ab"), shingles("ac"))


@given(st.text("ab c", max_size=40), st.text("ab c", max_size=40))
def test_similarity_is_that_of_the_sets(a, b):
    def sets(text):
        text = " ".join(text.split())
        return {text[i : i + SHINGLE] for i in range(max(1, len(text) - SHINGLE + 1))}

    expected = len(sets(a) & sets(b)) / len(sets(a) | sets(b))
    assert jaccard(shingles(a), shingles(b)) == pytest.approx(expected)
