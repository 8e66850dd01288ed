"""The line search: what it tries, when it stops, and what it takes for evidence."""

import numpy as np
import pytest

from dualtune.train.hybrid import step
from dualtune.train.hybrid.prediction import calibration, confidence, is_worse
from dualtune.train.hybrid.step import distances, line_search

NO_GAIN = np.zeros(4)


def searched(curve, taus=(1, 2, 4, 8), step_gain=NO_GAIN, interval=15):
    """Search where every document's loss is 10 − curve(τ), nearly."""
    noise = np.array([-0.01, 0.0, 0.0, 0.01])
    tried = []

    def losses_at(tau):
        tried.append(tau)
        return 10 - curve(tau) + noise

    return line_search(losses_at, np.full(4, 10.0), step_gain, taus, float, interval), tried


@pytest.mark.parametrize(
    ("most", "interval", "expected"),
    [(8, 15, [1, 2, 4, 8]), (50, 15, [1, 2, 4, 8, 15, 30, 45]), (75, 10, [1, 2, 4, 8, 10, 20, 30, 40, 50, 60, 70]),
     (1, 15, [1]), (0, 15, []), (5, 1, [1, 2, 3, 4, 5])],
)  # fmt: skip
def test_the_distances_double_and_then_go_in_intervals(most, interval, expected):
    assert distances(most, interval) == expected


def test_the_best_distance_is_found_and_the_first_worse_one_ends_the_search():
    found, tried = searched(lambda tau: tau * (7 - tau), taus=(1, 2, 4, 8, 15))
    assert (found.tau, tried, found.at_bound) == (4, [1, 2, 4, 8], False)
    assert found.num_probed == len(tried) and found.confidence == pytest.approx(1)


def test_no_distance_may_be_better_than_staying():
    found, tried = searched(lambda tau: -tau)
    assert (found.tau, found.confidence, found.losses_D, tried) == (0, 0.0, None, [1])
    assert searched(lambda tau: np.nan)[0].tau == 0


def test_the_farthest_distance_may_be_the_best():
    found, _ = searched(lambda tau: tau)
    assert (found.tau, found.at_bound) == (8, True)


def test_probes_at_multiples_of_the_interval_are_micro_corrections():
    found, tried = searched(lambda tau: tau, taus=distances(50, 15))
    assert tried == [1, 2, 4, 8, 15, 30, 45] and found.num_micro_corrections == 3


def test_a_gain_below_what_computed_steps_are_worth_is_none():
    """Computed steps gained 1 a step: 0.4 for a predicted one is too little, 0.6 enough."""
    worth = np.ones(4)
    assert searched(lambda tau: 0.4 * tau, step_gain=worth)[0].tau == 0
    assert searched(lambda tau: 0.6 * tau, step_gain=worth)[0].tau == 8
    assert searched(lambda tau: 0.1 * tau, step_gain=-worth)[0].tau == 8  # they made it worse: any gain counts
    assert searched(lambda tau: -0.1 * tau, step_gain=-worth)[0].tau == 0


# --- confidence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "expected"),
    [([1.0, 2.0, 3.0], 0.99973), ([-1.0, 0.0, 1.0], 0.5), ([-3.0, -2.0, -1.0], 0.00027), ([2.0, 2.0], 1.0),
     ([-2.0, -2.0], 0.0), ([0.0, 0.0], 0.0), ([1.0, np.nan], 0.0)],
)  # fmt: skip
def test_confidence_is_the_normal_probability_of_the_paired_t_statistic(gains, expected):
    assert confidence(np.array(gains)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("rise", "expected"),
    [([0.1, -0.1, 0.0], False), ([0.1, 0.1, 0.11], True), ([0.5, -0.4, 0.0], False), ([-1.0, -1.0, -1.0], False),
     ([0.0, 0.0, 0.0], False), ([np.nan, 0.0, 0.0], True)],
)  # fmt: skip
def test_worse_is_a_rise_of_more_than_one_standard_error(rise, expected):
    before = np.array([3.0, 5.0, 1.0])
    assert is_worse(before, before + np.array(rise)) == expected


def test_an_honest_confidence_is_the_share_of_those_that_were_better():
    """Against a simulation in which the truth is known: eight documents, a gain drawn as large as its error."""
    rng, pairs = np.random.default_rng(0), []
    for _ in range(4000):
        gain = rng.normal() / np.sqrt(8)
        pairs.append((confidence(gain + rng.normal(size=8)), gain + rng.normal(scale=1e-6) > 0))
    for found in calibration(pairs):
        assert found.low <= found.mean_confidence <= found.high
    shares = [found.share_better for found in calibration(pairs)]
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] > 0.7
    assert calibration([(1.0, True), (0.95, False)])[0].number == 2


# --- evidence, or chance ---------------------------------------------------------------------------------------------


class Quadratic:
    """Documents with a quadratic loss each, around optima that scatter around a common one."""

    def __init__(self, seed, num_weights=400, num_documents=8):
        self.rng = np.random.default_rng(seed)
        self.curvature = self.rng.uniform(0.1, 1.0, num_weights)
        self.optima = self.rng.normal(scale=0.7, size=(num_documents, num_weights))
        self.weights = self.rng.normal(scale=2.0, size=num_weights)

    def losses(self, weights):
        return 0.5 * ((weights - self.optima) ** 2 * self.curvature).sum(1)

    def velocity(self, rate=0.01):
        """A step of noisy gradient descent on other documents."""
        gradient = self.curvature * self.weights
        return -rate * (gradient + self.rng.normal(scale=0.3, size=gradient.shape))

    def accepts(self, direction, step_gain, threshold=0.6):
        now = self.losses(self.weights)
        found = line_search(
            lambda tau: self.losses(self.weights + tau * direction), now, step_gain, distances(50, 15), float, 15
        )
        return found.tau > 0 and found.confidence >= threshold


def share_accepted(is_random, num_trials=200):
    accepted = 0
    for seed in range(num_trials):
        problem = Quadratic(seed)
        velocity = problem.velocity()
        step_gain = (problem.losses(problem.weights - 8 * velocity) - problem.losses(problem.weights)) / 8
        if is_random:
            direction = problem.rng.normal(size=velocity.shape)
            velocity = direction * np.linalg.norm(velocity) / np.linalg.norm(direction)
        accepted += problem.accepts(velocity, step_gain)
    return accepted / num_trials


def test_a_random_direction_of_equal_length_is_rejected():
    assert share_accepted(is_random=True) <= 0.05
    assert share_accepted(is_random=False) >= 0.95


def test_without_a_yardstick_chance_would_pass(monkeypatch):
    """Any gain as evidence: about half of all directions have one, and the search keeps the best distance."""
    monkeypatch.setattr(step, "WORTH", 0.0)
    assert share_accepted(is_random=True) > 0.2
