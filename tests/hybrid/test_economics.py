"""Whether an attempt is made: expected gain against cost, waiting, exploring, and giving up."""

import pytest

from dualtune.config import parse_config
from dualtune.train.hybrid.prediction import Economics
from dualtune.train.hybrid.settings import step_cost

NEW = Economics(50, 50, 100.0)


def test_the_first_opportunity_is_taken():
    assert NEW.at_opportunity() == (NEW, True)


@pytest.mark.parametrize(("gain", "cost", "is_taken"), [(8.0, 3.0, True), (2.0, 3.0, False)])
def test_an_attempt_is_made_if_attempts_are_expected_to_pay(gain, cost, is_taken):
    assert Economics(50, 50, gain, cost).at_opportunity()[1] == is_taken


def test_the_expectation_is_a_running_mean():
    found = NEW.after_attempt(10.0, 2.0).after_attempt(0.0, 4.0)
    assert (found.expected_gain, found.expected_cost) == (pytest.approx(51.1), pytest.approx(1.62))


def test_a_first_failure_decides_nothing():
    assert NEW.after_attempt(0.0, 3.0).at_opportunity()[1]


def test_one_in_ten_is_explored_all_the_same():
    economics, taken = Economics(50, 50, 1.0, 3.0), []
    for _ in range(30):
        economics, is_wanted = economics.at_opportunity()
        taken.append(is_wanted)
    assert [at for at, is_wanted in enumerate(taken, 1) if is_wanted] == [10, 20, 30]


def test_failure_doubles_the_wait_and_halves_the_horizon_and_success_undoes_both():
    failed = NEW.after_failure().after_failure()
    assert (failed.wait, failed.horizon) == (4, 12)
    economics, taken = failed, []
    for _ in range(8):
        economics, is_wanted = economics.at_opportunity()
        taken.append(is_wanted)
    assert taken == [False, False, False, True] * 2
    assert (failed.after_success().wait, failed.after_success().horizon) == (2, 24)
    assert NEW.after_success() == NEW


def test_five_unprofitable_attempts_in_a_row_are_the_last():
    economics = NEW
    for _ in range(4):
        economics = economics.after_attempt(1.0, 2.0)
    assert not economics.is_disabled
    assert economics.after_attempt(3.0, 2.0).unprofitable == 0
    disabled = economics.after_attempt(2.0, 2.0)
    assert disabled.is_disabled and disabled.at_opportunity() == (disabled, False)
    assert disabled.after_attempt(99.0, 1.0).is_disabled


@pytest.mark.parametrize(
    ("settings", "cost"),
    [([], 2.11), (["memory.checkpointing=full"], 3.11), (["adapter.method=full"], 3.11)],
)
def test_a_full_step_costs_what_it_computes(settings, cost):
    config = parse_config("{model: {name: m}, data: {train: t}}", overrides=settings)
    assert step_cost(config) == pytest.approx(cost)
