"""One step ahead: the same as asking, whoever asks for what."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.data.batches import Ahead


@given(st.lists(st.integers(0, 9), max_size=20))
def test_it_gives_what_the_function_gives_whatever_is_asked_for(asked):
    with Ahead(lambda step: step * 10, 10) as ahead:
        assert [ahead(step) for step in asked] == [step * 10 for step in asked]


def test_the_next_step_is_made_while_the_current_one_runs_and_only_once():
    made, second = [], threading.Event()

    def make(step):
        made.append((step, threading.current_thread() is threading.main_thread()))
        if step == 1:
            second.set()
        return step

    with Ahead(make, 3) as ahead:
        assert ahead(0) == 0
        assert second.wait(10)  # nobody asked for it yet
        assert [ahead(1), ahead(2)] == [1, 2]
    assert made == [(0, True), (1, False), (2, False)]  # and nothing past the end


def test_an_error_of_the_thread_reaches_who_asks():
    def make(step):
        if step:
            raise ValueError("no such batch")
        return step

    with Ahead(make, 5) as ahead:
        ahead(0)
        with pytest.raises(ValueError, match="no such batch"):
            ahead(1)


def test_what_was_made_before_a_change_is_dropped():
    factor, made = 10, threading.Event()

    def make(step):
        result = step * factor
        if step == 1:
            made.set()
        return result

    with Ahead(make, 5) as ahead:
        ahead(0)
        assert made.wait(10)
        factor = 100
        ahead.drop()
        assert ahead(1) == 100
