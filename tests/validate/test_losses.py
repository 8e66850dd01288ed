"""The judgements of losses, against numbers worked out by hand."""

import math
import warnings

import pytest

from dualtune.doctor.validate.losses import (
    TrainingMetrics,
    assert_loss_convergence,
    assert_monotonic_decrease,
    decrease_of,
    largest_rise,
    window_means,
)


def falling(start: float, end: float, count: int) -> list[float]:
    return [start + (end - start) * i / (count - 1) for i in range(count)]


def test_a_loss_that_falls_by_half_converges():
    assert_loss_convergence(falling(2.5, 0.8, 40), min_decrease=0.5)


@pytest.mark.parametrize("losses", [[2.0] * 40, falling(1.0, 2.0, 40), [2.0] * 30 + [1.5] * 10])
def test_a_loss_that_is_flat_or_rises_or_falls_too_little_does_not(losses):
    with pytest.raises(AssertionError, match="did not decrease enough"):
        assert_loss_convergence(losses)


def test_the_message_says_both_means_and_the_decrease():
    with pytest.raises(AssertionError, match=r"4\.0000 → 3\.0000 \(25\.0% decrease\), must be at least 30\.0%"):
        assert_loss_convergence([4.0] * 10 + [9.0] + [3.0] * 10)


def test_the_limit_itself_is_enough():
    assert_loss_convergence([4.0] * 10 + [3.0] * 10, min_decrease=0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 19])
def test_a_loss_that_is_not_finite_never_converges(bad, place):
    losses = [4.0] * 10 + [1.0] * 10
    losses[place] = bad
    with pytest.raises(AssertionError, match="did not decrease enough"):
        assert_loss_convergence(losses)
    with pytest.raises(AssertionError):
        assert_monotonic_decrease(losses, 0.02, window=5)


def test_a_short_list_is_judged_by_halves_with_a_warning():
    with pytest.warns(UserWarning, match="5 losses are fewer than two windows of 10"):
        assert_loss_convergence([4.0, 4.0, 9.0, 1.0, 1.0])
    with pytest.warns(UserWarning), pytest.raises(AssertionError):
        assert_loss_convergence([4.0, 4.0])
    with pytest.raises(ValueError, match="got 1 losses"):
        assert_loss_convergence([4.0])


def test_means_may_rise_by_the_tolerance_and_no_more():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_monotonic_decrease([2.0] * 50 + [2.03] * 50 + [1.0] * 50, 0.02)
    with pytest.raises(AssertionError, match=r"rose by 3\.0%, allowed: 2\.0%. Means: 2\.0000, 2\.0600, 1\.0000"):
        assert_monotonic_decrease([2.0] * 50 + [2.06] * 50 + [1.0] * 50, 0.02)


def test_noise_of_single_steps_is_no_rise():
    noisy = [loss + (0.5 if i % 2 else -0.5) for i, loss in enumerate(falling(3.0, 2.0, 200))]
    assert_monotonic_decrease(noisy, 0.0)


def test_windows_are_whole():
    assert window_means([1.0, 3.0, 5.0, 7.0, 100.0], 2) == [2.0, 6.0]
    assert window_means([1.0], 2) == []


def test_a_rise_after_a_nan_is_a_nan():
    assert math.isnan(largest_rise([1.0, math.nan, 5.0]))
    assert math.isnan(largest_rise([1.0, 0.0, 5.0]))
    assert largest_rise([4.0, 3.0, 3.3]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="at least 2"):
        largest_rise([1.0])


def test_windows_that_would_overlap_are_refused():
    with pytest.raises(ValueError, match="at least two windows of 10"):
        decrease_of([1.0] * 19)


def test_three_known_steps(capsys):
    metrics = TrainingMetrics()
    for loss, step_time_ms, memory_bytes in ((3.0, 100.0, 5_000_000), (2.0, 90.0, 7_000_000), (1.0, 95.0, 6_000_000)):
        metrics.record(loss, step_time_ms, memory_bytes)
    assert (metrics.losses, metrics.step_times_ms) == ([3.0, 2.0, 1.0], [100.0, 90.0, 95.0])
    assert (metrics.average_loss, metrics.average_step_time_ms) == (2.0, 95.0)
    assert metrics.total_time_s == pytest.approx(0.285)
    assert metrics.peak_memory_bytes == 7_000_000
    metrics.print_summary()
    out = capsys.readouterr().out
    assert "2.0000 average" in out and "95.0 ms average" in out and "7.0 MB" in out


def test_no_steps_have_no_average():
    assert math.isnan(TrainingMetrics().average_loss) and math.isnan(TrainingMetrics().average_step_time_ms)
    assert TrainingMetrics().summary() == "steps         0"
