"""The objectives of preference training: values against their equations, slopes against finite differences,
and both against TRL."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config.combinations import PREFERENCE_KEYS
from dualtune.train.objectives.preference import OBJECTIVES, Scores, objective_of

TRL_LOSSES = Path(__file__).parent / "data" / "trl_losses.json"
OURS = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/accuracies": "reward_accuracy",
    "rewards/margins": "reward_margin",
    "logps/chosen": "chosen_logp",
    "logps/rejected": "rejected_logp",
    "nll_loss": "sft_loss",
    "log_odds_chosen": "log_odds",
    "kl": "kl",
}

SETTINGS = [
    ("dpo", {}),
    ("dpo", {"beta": 0.3, "label_smoothing": 0.2, "sft_weight": 0.7}),
    ("dpo", {"loss": "hinge", "beta": 0.4}),
    ("dpo", {"loss": "hinge", "beta": 0.7}),
    ("dpo", {"loss": "ipo", "beta": 0.5, "sft_weight": 0.1}),
    ("dpo", {"loss": "robust", "label_smoothing": 0.1}),
    ("dpo", {"loss": "apo_zero"}),
    ("orpo", {}),
    ("orpo", {"beta": 0.4, "sft_weight": 0.5}),
    ("simpo", {}),
    ("simpo", {"beta": 2.5, "gamma": 0.5, "sft_weight": 0.3}),
    ("cpo", {}),
    ("cpo", {"beta": 0.2, "label_smoothing": 0.1, "sft_weight": 0.0}),
    ("kto", {}),
    ("kto", {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
]
every_setting = pytest.mark.parametrize(
    ("name", "settings"), SETTINGS, ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value))
)


def id_of_case(case):
    return "-".join([case["objective"], *(f"{key}={value}" for key, value in case["settings"].items())])


def random_scores(num_units=9, seed=3):
    random = np.random.default_rng(seed)
    num_targets_NA = random.integers(1, 12, (num_units, 2))
    logps_NA = -random.uniform(0.05, 2.5, (num_units, 2)) * num_targets_NA
    reference_NA = logps_NA + random.normal(-0.5, 2.0, (num_units, 2))
    return Scores(logps_NA, num_targets_NA, reference_NA, np.resize([1, -1, -1], num_units))


def sigma(x):
    return 1 / (1 + math.exp(-x))


def odds(p):
    return p / (1 - p)


def pair_of(name, beta, settings, c, r, c0, r0, num_c, num_r):
    """The loss of one pair as its paper writes it, without the loss of SFT."""
    smoothing = settings.get("label_smoothing", 0.0)
    match name, settings.get("loss", "sigmoid"):
        case "dpo", "sigmoid":
            z = beta * ((c - c0) - (r - r0))
            return -(1 - smoothing) * math.log(sigma(z)) - smoothing * math.log(sigma(-z))
        case "dpo", "robust":
            z = beta * ((c - c0) - (r - r0))
            return (-(1 - smoothing) * math.log(sigma(z)) + smoothing * math.log(sigma(-z))) / (1 - 2 * smoothing)
        case "dpo", "hinge":
            return max(0, 1 - beta * ((c - c0) - (r - r0)))
        case "dpo", "ipo":
            return ((c - c0) / num_c - (r - r0) / num_r - 1 / (2 * beta)) ** 2
        case "dpo", "apo_zero":
            return 1 - sigma(beta * (c - c0)) + sigma(beta * (r - r0))
        case "cpo", _:
            z = beta * (c - r)
            return -(1 - smoothing) * math.log(sigma(z)) - smoothing * math.log(sigma(-z))
        case "simpo", _:
            return -math.log(sigma(beta * c / num_c - beta * r / num_r - settings.get("gamma", beta / 2)))
        case "orpo", _:
            ratio = odds(math.exp(c / num_c)) / odds(math.exp(r / num_r))
            return -beta * math.log(sigma(math.log(ratio)))


AUTO_BETA = {"simpo": 2.0}
AUTO_SFT_WEIGHT = {"orpo": 1.0, "cpo": 1.0}


def expected(name, settings, scores):
    beta = settings.get("beta", AUTO_BETA.get(name, 0.1))
    rows = list(zip(scores.logps_NA, scores.reference_NA, scores.num_targets_NA, scores.labels_N, strict=True))
    if name == "kto":
        kl = max(0, sum(logps[1] - reference[1] for logps, reference, _, _ in rows) / len(rows))
        total = 0.0
        for (c, _), (c0, _), _, label in rows:
            if label == 1:
                total += settings.get("desirable_weight", 1) * (1 - sigma(beta * (c - c0 - kl)))
            else:
                total += settings.get("undesirable_weight", 1) * (1 - sigma(beta * (kl - (c - c0))))
        return total / len(rows)
    pairs = [pair_of(name, beta, settings, c, r, c0, r0, m, n) for (c, r), (c0, r0), (m, n), _ in rows]
    sft_weight = settings.get("sft_weight", AUTO_SFT_WEIGHT.get(name, 0.0))
    sft = -sum(logps[0] for logps, *_ in rows) / sum(num_targets[0] for _, _, num_targets, _ in rows)
    return sum(pairs) / len(pairs) + sft_weight * sft


@every_setting
def test_the_value_is_that_of_the_papers_equation(name, settings):
    scores = random_scores()
    assert objective_of(name, **settings)(scores).value == pytest.approx(expected(name, settings, scores), abs=1e-12)


@every_setting
def test_slopes_are_those_of_finite_differences(name, settings):
    scores, objective, delta = random_scores(), objective_of(name, **settings), 1e-5
    slopes_NA = objective(scores).slopes_NA
    for index in np.ndindex(scores.logps_NA.shape):
        if index[1] >= objective.num_trained:
            assert slopes_NA[index] == 0  # KTO's KL depends on it, but has no gradient
            continue
        ends = []
        for step in (delta, -delta):
            logps_NA = scores.logps_NA.copy()
            logps_NA[index] += step
            ends.append(objective(replace(scores, logps_NA=logps_NA)).value)
        assert slopes_NA[index] == pytest.approx((ends[0] - ends[1]) / (2 * delta), abs=1e-9)
    assert np.abs(slopes_NA).max() > 1e-3


@every_setting
@pytest.mark.parametrize("size", [1e4, 0.0])
def test_extreme_scores_have_finite_values_and_slopes(name, settings, size):
    """Differences of ±1e4 and answers that are certain: no overflow, nothing that is not a number."""
    answers = np.array([[-size, 0.0], [0.0, -size], [-size, -size], [0.0, 0.0]])
    scores = Scores(answers, np.ones((4, 2), np.int64), answers[:, ::-1].copy(), np.array([1, -1, 1, -1]))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss = objective_of(name, **settings)(scores)
    assert math.isfinite(loss.value) and np.isfinite(loss.slopes_NA).all()
    assert all(math.isfinite(number) for number in loss.metrics.values())


@pytest.mark.parametrize("case", json.loads(TRL_LOSSES.read_text(encoding="utf-8")), ids=id_of_case)
def test_value_slopes_and_metrics_are_those_of_trl(case):
    """Recorded from TRL 1.16's own code by scripts/trl_reference.py; that of ORPO computes in float32."""
    arrays = {key: np.asarray(value) for key, value in case["inputs"].items()}
    scores = Scores(arrays["logps"], arrays["num_targets"], arrays["reference"], arrays["labels"])
    loss = objective_of(case["objective"], **case["settings"])(scores)
    assert loss.value == pytest.approx(case["value"], abs=1e-6)
    np.testing.assert_allclose(loss.slopes_NA, case["slopes"], atol=1e-6)
    recorded = {OURS[name]: value for name, value in case["metrics"].items()}
    if recorded.get("sft_loss") == 0:  # TRL computes no loss of SFT that has the weight 0
        del recorded["sft_loss"]
    assert {name: loss.metrics[name] for name in recorded} == pytest.approx(recorded, abs=1e-6)


def test_far_from_its_margin_a_loss_is_linear_or_flat():
    """At a margin of ±1e4 the sigmoid has the slope 0 or −β/N, and the value 0 or β·1e4 of each pair."""
    logps_NA = np.array([[-1.0, -1e4 - 1], [-1e4 - 1, -1.0]])
    scores = Scores(logps_NA, np.ones((2, 2), np.int64), np.zeros((2, 2)), np.zeros(2, np.int64))
    loss = objective_of("dpo", beta=0.5)(scores)
    assert loss.value == pytest.approx(0.5 * 1e4 / 2, rel=1e-12)
    np.testing.assert_allclose(loss.slopes_NA, [[0, 0], [-0.25, 0.25]], atol=1e-300)


def test_the_hinge_is_at_a_margin_of_1():
    scores = Scores(np.array([[-1.0, -1.9], [-1.0, -2.1]]), np.ones((2, 2), np.int64), np.zeros((2, 2)), np.zeros(2))
    loss = objective_of("dpo", loss="hinge", beta=1.0)(scores)
    assert loss.value == pytest.approx(0.05) and loss.slopes_NA.tolist() == [[-0.5, 0.5], [0, 0]]


def test_a_pair_does_not_depend_on_those_beside_it():
    """Without a loss of SFT, a step is the mean of its pairs."""
    scores = random_scores()
    for name, settings in SETTINGS:
        if name == "kto" or settings.get("sft_weight", AUTO_SFT_WEIGHT.get(name, 0.0)):
            continue
        objective = objective_of(name, **settings)
        alone = [objective(units_of(scores, [n])) for n in range(9)]
        together = objective(scores)
        assert together.value == pytest.approx(np.mean([loss.value for loss in alone]), abs=1e-12)
        np.testing.assert_allclose(
            together.slopes_NA, np.concatenate([loss.slopes_NA for loss in alone]) / 9, atol=1e-14
        )


def units_of(scores, rows):
    return Scores(scores.logps_NA[rows], scores.num_targets_NA[rows], scores.reference_NA[rows], scores.labels_N[rows])


def test_metrics_of_pairs():
    scores = Scores(
        np.array([[-4.0, -9.0], [-8.0, -6.0]]), np.array([[2, 3], [4, 3]]), np.array([[-5.0, -7.0], [-6.0, -7.0]]),
        np.zeros(2, np.int64),
    )  # fmt: skip
    dpo = objective_of("dpo", beta=0.5, loss="ipo")(scores).metrics  # rewards 0.5·(1, -2) and 0.5·(-2, 1)
    assert dpo == {
        "reward_margin": 0.0, "reward_accuracy": 0.5, "chosen_reward": -0.25, "rejected_reward": -0.25,
        "chosen_logp": -6.0, "rejected_logp": -7.5,
    }  # fmt: skip
    orpo = objective_of("orpo", beta=0.5)(scores).metrics  # per target: (-2, -3) and (-2, -2)
    assert orpo["chosen_logp"] == -2 and orpo["rejected_logp"] == -2.5 and orpo["reward_margin"] == 0.25
    assert orpo["reward_accuracy"] == 0.5 and orpo["sft_loss"] == 2.0
    assert orpo["log_odds"] == pytest.approx(math.log(odds(math.exp(-2)) / odds(math.exp(-3))) / 2)
    simpo = objective_of("simpo")(scores).metrics
    assert simpo["chosen_reward"] == -4 and simpo["rejected_reward"] == -5 and "sft_loss" not in simpo
    assert objective_of("cpo", beta=0.5)(scores).metrics["chosen_reward"] == -3


def test_metrics_of_kto_are_of_the_kinds_that_the_step_has():
    logps_NA, reference_NA = np.array([[-4.0, -9.0], [-8.0, -6.0]]), np.array([[-5.0, -11.0], [-6.0, -6.0]])
    scores = Scores(logps_NA, np.ones((2, 2), np.int64), reference_NA, np.array([1, -1]))
    kto = objective_of("kto", beta=0.5)
    assert kto(scores).metrics == {
        "kl": 1.0, "chosen_reward": 0.5, "rejected_reward": -1.0, "reward_margin": 1.5,
        "chosen_logp": -4.0, "rejected_logp": -8.0,
    }  # fmt: skip
    desirable = kto(units_of(scores, [0])).metrics
    assert desirable == {"kl": 2.0, "chosen_reward": 0.5, "chosen_logp": -4.0}
    assert kto(replace(scores, reference_NA=reference_NA + 9)).metrics["kl"] == 0  # never below


def test_auto_is_the_value_that_the_paper_recommends():
    assert objective_of("dpo", loss="auto", beta="auto", sft_weight="auto") == OBJECTIVES["dpo"]()
    scores = random_scores()
    for name, explicit in {
        "dpo": {"loss": "sigmoid", "beta": 0.1, "sft_weight": 0},
        "orpo": {"beta": 0.1, "sft_weight": 1},
        "simpo": {"beta": 2, "gamma": 1, "sft_weight": 0},
        "cpo": {"beta": 0.1, "sft_weight": 1},
        "kto": {"beta": 0.1},
    }.items():
        assert (
            objective_of(name, **dict.fromkeys(explicit, "auto"))(scores).value
            == objective_of(name, **explicit)(scores).value
        )
    assert objective_of("simpo", beta=3.0)(scores).value == objective_of("simpo", beta=3, gamma=1.5)(scores).value


def test_the_settings_of_an_objective_are_its_keys_in_the_config():
    for name, kind in OBJECTIVES.items():
        keys = [field.name for field in fields(kind)] + ["reference"] * kind.needs_reference
        assert keys == [*PREFERENCE_KEYS[name]]
    with pytest.raises(ConfigError, match="allows only 0"):
        objective_of("dpo", loss="hinge", label_smoothing=0.1)


def test_scores_that_do_not_fit_are_refused():
    scores = random_scores()
    for wrong in (
        {"num_targets_NA": np.ones((9, 1), np.int64)},
        {"num_targets_NA": np.zeros((9, 2), np.int64)},
        {"reference_NA": np.zeros((8, 2))},
        {"labels_N": np.zeros(8, np.int64)},
    ):
        with pytest.raises(ValueError):
            replace(scores, **wrong)
    with pytest.raises(ValueError, match="reference"):
        objective_of("dpo")(replace(scores, reference_NA=None))
    with pytest.raises(ValueError, match="label"):
        objective_of("kto")(replace(scores, labels_N=np.zeros(9, np.int64)))
