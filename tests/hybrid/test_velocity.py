"""The velocity: a least-squares slope, exact on a line, and steps counted by the learning rate."""

import numpy as np
import pytest

from dualtune.train.hybrid.prediction import Window, cosine, flatten, half_window, norm, reach, split


def window_of(path, half=8):
    """The window over path(0) … path(2·half)."""
    window = Window(half, path(0).astype(np.float32))
    for at in range(1, 2 * half + 1):
        if window.needs(2 * half - at):
            window = window.with_snapshot(2 * half - at, path(at).astype(np.float32))
    return window


def test_on_a_line_the_velocity_is_its_slope():
    rng = np.random.default_rng(0)
    start, slope = rng.normal(size=50), rng.normal(size=50)
    window = window_of(lambda at: start + at * slope)
    assert window.velocity() == pytest.approx(slope, abs=1e-5) and window.velocity().dtype == np.float32
    assert window.consistency((start + 16 * slope).astype(np.float32)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("half", [2, 5, 8])
def test_it_is_the_least_squares_slope_of_the_last_snapshots(half):
    path = np.random.default_rng(1).normal(size=(2 * half + 1, 7))
    expected = np.polyfit(np.arange(half), path[half + 1 :], 1)[0]
    assert window_of(lambda at: path[at], half).velocity() == pytest.approx(expected, abs=1e-5)


def test_weights_that_turn_back_are_not_consistent():
    there_and_back = window_of(lambda at: np.array([8.0 - abs(at - 8)]))
    assert there_and_back.consistency(np.array([0.0], np.float32)) == pytest.approx(-1)
    assert cosine(np.zeros(3), np.ones(3)) == 0


def test_a_full_phase_has_room_for_its_window():
    assert [half_window(n) for n in (4, 5, 15, 16, 20)] == [2, 2, 7, 8, 8]
    assert all(2 * half_window(n) <= n for n in range(4, 40))


def test_a_step_ahead_is_worth_its_learning_rate():
    assert reach([1.0, 1.0, 1.0], 1.0) == [1, 2, 3]
    assert reach([0.5, 0.25, 0.0], 0.5) == [1, 1.5, 1.5]


def test_tensors_become_a_vector_and_back_bit_for_bit():
    rng = np.random.default_rng(2)
    tensors = {"b": rng.normal(size=(2, 3)).astype(np.float32), "a": rng.normal(size=4).astype(np.float32)}
    vector = flatten(tensors)
    back = split(vector, tensors)
    assert vector.tolist()[:4] == tensors["a"].tolist()
    assert all(back[name].tobytes() == tensors[name].tobytes() for name in tensors)
    assert norm(vector) == pytest.approx(float(np.linalg.norm(vector)))
