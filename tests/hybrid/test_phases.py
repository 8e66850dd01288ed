"""The transition table of the phases, and full phases that are forced."""

from itertools import product

import pytest

from dualtune.train.hybrid.monitor import TRANSITIONS, IllegalTransition, Stage, TrainingPhase

WARMUP, FULL, PREDICT, CORRECT = TrainingPhase
LEGAL = {
    (WARMUP, FULL), (FULL, FULL), (FULL, PREDICT), (PREDICT, PREDICT), (PREDICT, CORRECT), (PREDICT, FULL),
    (CORRECT, FULL),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), product(TrainingPhase, repeat=2), ids=str)
def test_a_transition_is_in_the_table_or_raises(before, after):
    if (before, after) in LEGAL:
        assert Stage(before, 0).enter(after, 7) == Stage(after, 7)
    else:
        with pytest.raises(IllegalTransition, match=f"phase {after} after {before}; allowed: "):
            Stage(before, 0).enter(after, 7)


def test_the_first_full_phase_cannot_be_left_out():
    assert TRANSITIONS[WARMUP] == {FULL}


def test_an_ordinary_step_counts_down():
    assert Stage(FULL, 3).stepped() == Stage(FULL, 2)


@pytest.mark.parametrize(("left", "forced", "expected"), [(3, 9, 9), (9, 3, 9)])
def test_a_full_phase_is_forced_at_once(left, forced, expected):
    assert Stage(FULL, left).forcing_full(forced) == Stage(FULL, expected)


def test_in_another_phase_it_is_forced_when_the_next_one_begins():
    """A prediction that waits for its check is checked first."""
    stage = Stage(CORRECT, 2).forcing_full(30)
    assert (stage.phase, stage.left) == (CORRECT, 2)
    entered = stage.enter(FULL, 20)
    assert entered == Stage(FULL, 30) and entered.enter(FULL, 20) == Stage(FULL, 20)
    assert Stage(WARMUP, 5).forcing_full(30).enter(FULL, 40).left == 40
