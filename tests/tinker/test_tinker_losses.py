"""The losses of the Tinker API: the formulas of its documentation, their slopes, and what they refuse."""

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.use.tinker.losses import LOSSES, check_inputs, check_loss, loss_of

CONFIGS = {"dro": {"beta": 0.3}}  # what has no default


@pytest.fixture
def datum():
    """Twelve targets, of which the ratios lie on both sides of every limit, with advantages of both signs and none."""
    rng = np.random.default_rng(0)
    logps = rng.uniform(-3, -0.1, 12)
    inputs = {
        "target_tokens": rng.integers(0, 50, 12),
        "logprobs": (logps + np.tile([-0.5, -0.1, 0.0, 0.1, 0.5, 0.3], 2)).astype(np.float32),
        "advantages": np.repeat([1.5, -0.75], 6).astype(np.float32),
        "sequence_ratio_mask": (np.arange(12) > 3).astype(np.float32),
        "weights": rng.normal(size=12).astype(np.float32),
    }
    inputs["advantages"][[2, 8]] = 0
    return logps.astype(np.float32), inputs


def inputs_of(name, inputs):
    loss = LOSSES[name]
    return {key: inputs[key] for key in ("target_tokens", *loss.needs, *loss.allows)}


# What the documentation says, target by target. What is a constant there (`detach`) is given: `now` is log p itself.


def documented(name, logp, now, ratio_now, inputs, t, low, high, beta):
    q, advantage = float(inputs["logprobs"][t]), float(inputs["advantages"][t])
    ratio = np.exp(logp - q)
    match name:
        case "cross_entropy":
            return -logp * float(inputs["weights"][t])
        case "importance_sampling":
            return -(ratio * advantage)
        case "ppo":
            return -min(ratio * advantage, min(max(ratio, low), high) * advantage)
        case "cispo":
            return -(min(max(np.exp(now - q), low), high) * logp * advantage)
        case "dro":
            return -(logp * advantage - 0.5 * beta * (logp - q) ** 2)
        case "gspo":
            ratio = np.exp(ratio_now + logp - now)
            return -min(ratio * advantage, min(max(ratio, low), high) * advantage)


@pytest.mark.parametrize("name", LOSSES)
def test_each_is_its_documented_formula_and_its_slope_that_of_finite_differences(name, datum):
    logps, inputs = datum
    config = check_loss(name, CONFIGS.get(name, {})).constants | CONFIGS.get(name, {})
    low, high, beta = (config.get(key, np.nan) for key in ("clip_low_threshold", "clip_high_threshold", "beta"))
    values, slopes = loss_of(name, logps, inputs_of(name, inputs), CONFIGS.get(name, {}))
    exact = logps.astype(np.float64)
    marked = inputs["sequence_ratio_mask"] != 0
    ratio_now = float((exact - inputs["logprobs"])[marked].mean())
    for t, now in enumerate(exact):
        of = [documented(name, x, now, ratio_now, inputs, t, low, high, beta) for x in (now, now - 1e-6, now + 1e-6)]
        assert values[t] == pytest.approx(of[0], rel=1e-12, abs=1e-15)
        assert slopes[t] == pytest.approx((of[2] - of[1]) / 2e-6, rel=1e-6, abs=1e-8)
    if name in ("ppo", "gspo"):
        assert 0 < np.count_nonzero(slopes) < np.count_nonzero(inputs["advantages"])  # both sides of the limits


def test_the_limits_may_be_those_of_each_target(datum):
    """And they replace those of the call."""
    logps, inputs = datum
    own = inputs_of("ppo", inputs)
    wide = own | {"clip_low_threshold": np.zeros(12), "clip_high_threshold": np.full(12, 9.0)}
    check_inputs("ppo", 0, wide)
    free, _ = loss_of("importance_sampling", logps, own, {})
    assert np.array_equal(loss_of("ppo", logps, wide, {"clip_high_threshold": 1.0})[0], free)
    assert not np.array_equal(loss_of("ppo", logps, own, {"clip_high_threshold": 1.0})[0], free)


def test_a_ratio_that_overflows_counts_only_with_an_advantage():
    inputs = {"target_tokens": np.zeros(2, int), "logprobs": np.full(2, -1e4), "advantages": np.array([0.0, 0.0])}
    for name in ("importance_sampling", "ppo", "cispo"):
        values, slopes = loss_of(name, np.zeros(2, np.float32), inputs, {})
        assert values.tolist() == slopes.tolist() == [0, 0]


def test_several_targets_in_a_place_have_weights_of_their_own():
    logps = np.log(np.array([[0.5, 0.25], [0.125, 0.5]], np.float32))
    inputs = {"target_tokens": np.ones((2, 2), int), "weights": np.array([[1, 2], [0, -4]], np.float32)}
    check_inputs("cross_entropy", 0, inputs)
    values, slopes = loss_of("cross_entropy", logps, inputs, {})
    assert values == pytest.approx(np.log(2) * np.array([[1, 4], [0, -4]]))
    assert np.array_equal(slopes, -inputs["weights"])


def test_without_weights_each_target_counts_once():
    values, slopes = loss_of(
        "cross_entropy", np.array([-1.0, -2.0], np.float32), {"target_tokens": np.zeros(2, int)}, {}
    )
    assert values.tolist() == [1, 2] and slopes.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("name", "config", "changes"),
    [
        ("stable_reinforce", {}, {}),
        ("custom", {"loss_id": "x"}, {}),
        ("cross_entropy", {"clip_low_threshold": 0.5}, {}),
        ("ppo", {"clip_low_threshold": "0.5"}, {}),
        ("ppo", {"clip_low_threshold": np.nan}, {}),
        ("dro", {}, {}),
        ("ppo", {}, {"advantages": None}),
        ("ppo", {}, {"target_tokens": None}),
        ("ppo", {}, {"mask": np.ones(12)}),
        ("ppo", {}, {"advantages": np.ones(11)}),
        ("ppo", {}, {"advantages": np.full(12, np.inf)}),
        ("ppo", {}, {"target_tokens": np.zeros((12, 2))}),
        ("cross_entropy", {}, {"target_tokens": np.zeros((12, 2, 2))}),
        ("gspo", {}, {"sequence_ratio_mask": np.zeros(12)}),
    ],
)
def test_what_a_loss_does_not_read_is_refused_by_name(name, config, changes, datum, wording):
    logps, inputs = datum
    with pytest.raises(ConfigError) as error:
        check_loss(name, config)
        own = {key: x for key, x in (inputs_of(name, inputs) | changes).items() if x is not None}
        check_inputs(name, 3, own)
        loss_of(name, logps, own, config)
    wording(str(error.value))
