"""Each signal of the divergence monitor by itself."""

import math
from functools import reduce

import pytest

from dualtune.train.hybrid.monitor import Level, Monitor, SignalKind, prediction_error

THRESHOLD = 3.0


def after(losses, grad_norms=None, monitor=None):
    """The monitor after these steps, and the signal of the last one."""
    norms = grad_norms or [1.0] * len(losses)
    steps = zip(losses, norms, strict=True)
    return reduce(lambda found, step: found[0].observe(*step, THRESHOLD), steps, (monitor or Monitor(), None))


CALM = [2.0 + 0.01 * (i % 3 - 1) for i in range(30)]  # mean 2, standard deviation 0.008


def test_a_calm_run_has_no_signal():
    monitor, signal = after(CALM)
    assert signal is None and monitor.counts == (0, 0, 0, 0) and monitor.is_ready
    assert monitor.loss == pytest.approx(2, abs=0.01) and math.sqrt(monitor.variance) == pytest.approx(0.008, rel=0.2)


@pytest.mark.parametrize(
    ("loss", "level"), [(2.015, None), (2.035, Level.WARNING), (2.5, Level.CRITICAL), (1.0, None)]
)  # a fall is no divergence
def test_the_loss_leaves_its_band(loss, level):
    _, signal = after([loss], monitor=after(CALM)[0])
    assert signal is None if level is None else (signal.kind, signal.level) == (SignalKind.LOSS, level)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [(9.9, None), (10.1, (SignalKind.EXPLODING, Level.CRITICAL)), (0.011, None),
     (0.009, (SignalKind.VANISHING, Level.CAUTION))],
)  # fmt: skip
def test_a_gradient_explodes_or_vanishes(norm, expected):
    _, signal = after([2.0], [norm], after(CALM)[0])
    assert (signal and (signal.kind, signal.level)) == expected


@pytest.mark.parametrize("numbers", [(math.nan, 1.0), (2.0, math.inf), (-math.inf, math.nan)])
def test_a_number_that_is_not_finite_is_critical_at_once_and_leaves_the_means(numbers):
    for before in (Monitor(), after(CALM)[0]):
        monitor, signal = before.observe(*numbers, THRESHOLD)
        assert (signal.kind, signal.level) == (SignalKind.NONFINITE, Level.CRITICAL)
        assert (monitor.loss, monitor.variance, monitor.number) == (before.loss, before.variance, before.number)
        assert monitor.counts[Level.CRITICAL] == 1


@pytest.mark.parametrize(
    ("predicted", "level"),
    [(2.0, None), (1.7, None), (1.5, Level.WARNING), (2.9, Level.CAUTION), (0.9, Level.CRITICAL),
     (math.nan, Level.CRITICAL), (0.0, Level.CRITICAL), (9.0, Level.CAUTION)],
)  # fmt: skip
def test_the_predicted_loss_is_compared_with_the_actual_one(predicted, level):
    """An accurate prediction is no error. With the error in place of the prediction, it would be one of 100 %.

    A loss that is lower than predicted is no reason to undo the prediction.
    """
    monitor, signal = Monitor().compare(predicted, 2.0)
    assert (signal and signal.level) == level
    assert sum(monitor.counts) == (level is not None)
    assert prediction_error(2.0, 2.0) == 0 and prediction_error(1.0, 2.0) == 0.5


def test_a_loss_that_swings_with_every_step_oscillates():
    _, signal = after([2.0 + (0.6 if i % 2 else -0.6) for i in range(60)])
    assert (signal.kind, signal.level) == (SignalKind.OSCILLATION, Level.CAUTION)
    assert after([2.0 + 0.001 * (-1) ** i for i in range(60)])[1] is None  # far too little


def test_three_warnings_in_a_row_escalate():
    monitor, levels = after(CALM)[0], []
    for loss in (2.035, 2.045, 2.055):
        monitor, signal = monitor.observe(loss, 1.0, THRESHOLD)
        levels.append(signal.level)
    assert levels == [Level.WARNING, Level.WARNING, Level.CRITICAL] and "3 warnings in a row" in signal.message
    assert monitor.counts == (0, 0, 2, 1)


def test_a_calm_step_ends_the_row():
    monitor = after(CALM)[0]
    for loss in (2.035, 2.045, 2.0, 2.06):
        monitor, signal = monitor.observe(loss, 1.0, THRESHOLD)
    assert signal.level is Level.WARNING and monitor.counts[Level.CRITICAL] == 0


def test_nothing_is_judged_before_ten_steps():
    _, signal = after([2.0] * 9, [1.0] * 9)
    assert signal is None and after([50.0], [99.0], after([2.0] * 9)[0])[1] is None
