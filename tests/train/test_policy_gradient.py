"""GRPO, its variants and RLOO: value and slopes against TRL's own code and finite differences; advantages by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.train.objectives.policy_gradient import LEAST_DEVIATION, OBJECTIVES, SampledTokens, advantages

CASES, TEMPERED = (
    json.loads((Path(__file__).parent / "data" / f"trl_{name}.json").read_text()) for name in ("policy", "tempered")
)
CONSTANTS = {"beta": "kl", "epsilon_low": "clip_low", "epsilon_high": "clip_high"}  # TRL's names, and ours


def inputs(case):
    arrays = [np.array(case[key], np.float64) for key in ("logps", "old")]
    reference = np.array(case["reference"]) if case["settings"].get("beta") else None
    return SampledTokens(*arrays, np.array(case["lengths"]), np.array(case["advantages"]), reference)


def objective_of(case):
    constants = {CONSTANTS[key]: value for key, value in case["settings"].items() if key in CONSTANTS}
    if case["objective"] == "cispo":  # TRL's limit is the ratio itself
        constants["clip_high"] -= 1
    return replace(OBJECTIVES[case["objective"]], **{"clip_low": 0.2, "clip_high": 0.2, **constants})


def loss(case, tokens):
    return objective_of(case)(tokens, case["max_tokens"], sum(case["lengths"]), len(case["lengths"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['objective']} {case['settings']}")
def test_value_and_slopes_are_trls(case):
    ours = loss(case, inputs(case))
    assert ours.value == pytest.approx(case["value"], abs=1e-9)
    np.testing.assert_allclose(ours.slopes_M, case["slopes"], atol=1e-9)
    theirs = case["metrics"]
    if "kl" in theirs:
        assert ours.metrics["kl"] == pytest.approx(theirs["kl"], abs=1e-7)
    if "clip_ratio/low_mean" in theirs:
        assert ours.metrics["clip_low"] == pytest.approx(theirs["clip_ratio/low_mean"], abs=1e-7)
        assert ours.metrics["clip_high"] == pytest.approx(theirs["clip_ratio/high_mean"], abs=1e-7)
    assert np.count_nonzero(ours.slopes_M) > 5


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['objective']} {case['settings']}")
def test_slopes_are_those_of_finite_differences(case):
    """CISPO's ratio is a constant of its loss, so its slopes are those at the ratio that it has."""
    tokens, objective = inputs(case), objective_of(case)
    ours = loss(case, tokens)
    if not objective.stops_at_clip:
        capped_M = np.minimum(np.exp(tokens.logps_M - tokens.old_M), 1 + objective.clip_high)
        np.testing.assert_allclose(ours.slopes_M, -capped_M * tokens.of_tokens(tokens.advantages_N) / len(capped_M))
        return
    for m in range(0, len(tokens.logps_M), 3):
        step = np.zeros(len(tokens.logps_M))
        step[m] = 1e-6
        up, down = (loss(case, replace(tokens, logps_M=tokens.logps_M + sign * step)).value for sign in (1, -1))
        assert ours.slopes_M[m] == pytest.approx((up - down) / 2e-6, abs=1e-8)


def test_samples_without_an_advantage_may_be_absent():
    """They add nothing, but count in what the loss is divided by."""
    case = {**CASES[0], "advantages": [0.5, 0, 0, -1.0, 0, 0.2]}
    tokens = inputs(case)
    present_N = tokens.advantages_N != 0
    present_M = tokens.of_tokens(present_N)
    few = SampledTokens(
        tokens.logps_M[present_M], tokens.old_M[present_M], tokens.lengths_N[present_N], tokens.advantages_N[present_N]
    )
    for name in OBJECTIVES:
        whole, part = (
            loss({**case, "objective": name, "settings": {"epsilon_high": 1.2}}, each) for each in (tokens, few)
        )
        assert part.value == pytest.approx(whole.value, rel=1e-12)
        np.testing.assert_allclose(part.slopes_M, whole.slopes_M[present_M], rtol=1e-12)
        assert not whole.slopes_M[~present_M].any()


REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, np.nan, 3.0, 6.0]])


def test_an_advantage_is_the_distance_from_the_group():
    plain = advantages(REWARDS, "none")
    np.testing.assert_allclose(plain, [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0], [-3, 0, 0, 3]])
    deviations = np.array([[np.std([1, 0, 0, 1], ddof=1)], [0], [np.std([0, 3, 6], ddof=1)]]) + LEAST_DEVIATION
    np.testing.assert_allclose(advantages(REWARDS, "group"), plain / deviations)
    whole = np.std(REWARDS[np.isfinite(REWARDS)], ddof=1) + LEAST_DEVIATION
    np.testing.assert_allclose(advantages(REWARDS, "step"), plain / whole)


def test_rloo_compares_with_the_others():
    left_out = advantages(REWARDS, "none", leave_one_out=True)
    np.testing.assert_allclose(left_out[0], [1 - 1 / 3, -2 / 3, -2 / 3, 2 / 3])
    np.testing.assert_allclose(left_out[2], [-4.5, 0, 0, 4.5])


@pytest.mark.parametrize("scale", ["group", "step", "none"])
def test_unknown_rewards_are_no_numbers_of_a_gradient(scale):
    lonely = np.array([[np.nan, 1.0, np.nan], [np.nan] * 3])
    assert not advantages(lonely, scale).any()


# --- at a temperature -------------------------------------------------------------------------------------------------


def tempered_loss(case):
    """Return logits, probabilities and log-probabilities of the tokens at the temperature, and the loss of these."""
    now, old, reference = (np.array(case[key]) for key in ("now", "old", "reference"))
    cap, rows, tokens = case["cap"] or 1e9, np.arange(len(now)), np.array(case["tokens"])
    scaled = [cap * np.tanh(x / cap) / case["temperature"] for x in (now, old, reference)]
    probs = [np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in scaled]
    logps, old_M, reference_M = (np.log(p[rows, tokens]) for p in probs)
    samples = SampledTokens(logps, old_M, np.array(case["lengths"]), np.array(case["advantages"]), reference_M)
    return now, probs[0], logps, loss({"objective": "grpo", "max_tokens": 12, **case}, samples)


@pytest.mark.parametrize("case", TEMPERED, ids=lambda case: f"{case['temperature']}")
def test_the_loss_of_a_tempered_policy_and_its_gradient_are_trls(case):
    now, probs_MV, logps_M, ours = tempered_loss(case)
    np.testing.assert_allclose(logps_M, case["logps"], atol=1e-9)
    assert (ours.value, ours.metrics["kl"]) == pytest.approx((case["value"], case["kl"]), abs=1e-7)
    gradient_MV = -ours.slopes_M[:, None] * probs_MV
    gradient_MV[np.arange(len(now)), case["tokens"]] += ours.slopes_M
    gradient_MV /= case["temperature"]
    if case["cap"]:
        gradient_MV *= 1 - np.tanh(now / case["cap"]) ** 2
    np.testing.assert_allclose(gradient_MV, case["gradient"], atol=1e-9)


@pytest.mark.parametrize(("backend", "case"), [("torch", TEMPERED[0]), ("torch", TEMPERED[1]), ("mlx", TEMPERED[0])],
                         ids=["torch", "torch with a cap", "mlx"])  # fmt: skip
def test_a_fast_head_gives_trls_gradient_at_a_temperature(backend, case):
    """With the identity as its weight, whose products are the logits themselves."""
    now, _, _, ours = tempered_loss(case)
    weights = -ours.slopes_M.astype(np.float32)
    if backend == "torch":
        torch = pytest.importorskip("torch")
        from dualtune_torch.kernels import cross_entropy

        leaf = torch.tensor(now, dtype=torch.float32, requires_grad=True)
        head, scaling = torch.eye(7), cross_entropy.Scaling(case["cap"], torch.tensor(case["temperature"]))
        rest = torch.tensor(case["tokens"]), scaling, lambda function: function
        logps = cross_entropy.target_logprobs(leaf.detach(), head, None, *rest)
        cross_entropy.LinearCrossEntropy.apply(leaf, head, None, *rest, torch.from_numpy(weights)).backward()
        gradient = leaf.grad
    else:
        mx = pytest.importorskip("mlx.core")
        from dualtune_mlx.kernels import cross_entropy

        linear = pytest.importorskip("mlx.nn").Linear(7, 7, bias=False)
        linear.weight = mx.eye(7)
        head = cross_entropy.Head(linear).at(mx.array(case["temperature"]))
        places = mx.arange(len(now)), mx.array(case["tokens"]), head
        leaf = mx.array(now.astype(np.float32))
        logps = cross_entropy.target_logprobs(leaf, *places)
        gradient = mx.grad(lambda x: cross_entropy.target_loss(x, *places, weights_N=mx.array(weights)))(leaf)
    np.testing.assert_allclose(np.array(logps), case["logps"], atol=1e-6)
    np.testing.assert_allclose(np.array(gradient), case["gradient"], atol=1e-6)
