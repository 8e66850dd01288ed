"""Paired intervals: how wide they are at the ends, and how often they hold the true difference."""

import numpy as np
import pytest

from dualtune.use.scoring.compare import compare_losses, compare_scores, newcombe


def rows(both, only_base, only_adapter, none):
    """Base and adapter, bool, with so many rows of each kind."""
    base = [True] * (both + only_base) + [False] * (only_adapter + none)
    adapter = [True] * both + [False] * only_base + [True] * only_adapter + [False] * none
    return np.array(base), np.array(adapter)


def test_where_all_rows_agree_the_interval_still_has_a_width():
    """Four rows that only the adapter gets right do not prove a difference of exactly 1 (Wilson: at least 0.51)."""
    low, high = newcombe(*rows(0, 0, 4, 0))
    assert high == pytest.approx(1.0) and low == pytest.approx(1 - 2**0.5 * (1 - 0.5101), abs=1e-4)
    low, high = newcombe(*rows(10, 0, 0, 10))
    assert low == pytest.approx(-high) and 0.05 < high < 0.2


def test_the_two_sides_of_newcombe_mirror_each_other():
    base, adapter = rows(21, 3, 9, 17)
    low, high = newcombe(base, adapter)
    assert newcombe(adapter, base) == pytest.approx((-high, -low))
    assert low < 6 / 50 < high


def coverage(draw, interval, truth, number=300):
    rng = np.random.default_rng(1)
    found = [interval(*draw(rng)) for _ in range(number)]
    return sum(low <= truth <= high for low, high in found) / number


def test_the_intervals_hold_the_truth_as_often_as_they_promise(monkeypatch):
    """95 % is promised; 300 samples of 40 rows, fixed by the seed."""
    from dualtune.use.scoring import compare

    monkeypatch.setattr(compare, "RESAMPLES", 300)

    def answers(rng):
        base = rng.random(40) < 0.6
        return base, np.where(rng.random(40) < 0.7, base, rng.random(40) < 0.9)  # correlated; 0.6 and 0.69

    def losses(rng):
        weights = rng.integers(1, 30, 40).astype(float)
        base = rng.gamma(2, 1, 40)
        return tuple(np.stack([weights * x, weights], 1) for x in (base, base - 0.3 + rng.normal(0, 0.4, 40)))

    def of_losses(base, adapter):
        found = compare_losses(base, adapter)
        return found.low, found.high

    assert 0.93 <= coverage(answers, newcombe, 0.09) <= 0.99
    assert 0.91 <= coverage(losses, of_losses, -0.3) <= 0.98


def test_a_row_counts_by_its_target_tokens():
    """Losses 1 and 3 over 30 and 10 tokens: 1.5. A row without targets does not count."""
    base = np.array([[30.0, 30], [30.0, 10], [0, 0]])
    adapter = np.array([[15.0, 30], [30.0, 10], [0, 0]])
    found = compare_losses(base, adapter)
    assert (found.base, found.adapter, found.difference, found.rows) == pytest.approx((1.5, 1.125, -0.375, 2))
    assert found.low == pytest.approx(-0.5) and found.high == pytest.approx(0)  # either row alone
    assert found.verdict == "no difference shown"


def test_pairs_find_what_separate_samples_hide():
    """Rows differ by 100 times the effect; the same rows on both sides show it."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 10, 50)
    found = compare_scores("m", base, base + 0.1 + rng.normal(0, 0.05, 50))
    assert found.low > 0 and found.verdict == "adapter higher" and found.method == "bootstrap"
    assert compare_scores("m", base, base + 0.1).low == pytest.approx(0.1)


def test_one_row_has_no_interval():
    found = compare_scores("right", np.array([False]), np.array([True]))
    assert (found.low, found.high, found.verdict) == (None, None, "too few rows")
    assert compare_losses(np.ones((1, 2)), np.ones((1, 2))).low is None
    assert compare_scores("m", np.ones(60), np.full(60, np.nan)).verdict == "not finite"
