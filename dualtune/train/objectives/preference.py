"""Objectives that compare answers: DPO and its variants, ORPO, SimPO, CPO and KTO, as NumPy functions.

An objective is a function of a whole step. It gets one number for each answer, Σ w·log p over the answer's targets,
and returns its value and the slope ∂value/∂(Σ w·log p). By the chain rule the gradient of the step is then that of the
engine's own loss, Σ −w·log p, with the weight −slope·w for each target, so no engine knows any of them, and answers
that are compared need not be in one micro-batch.

In the equations, c and r are Σ log p of the chosen and the rejected answer, |c| and |r| their numbers of targets,
c₀ and r₀ the same sums under the reference model, σ the logistic function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.base.plugins import installed
from dualtune.config import Config
from dualtune.config.values import OBJECTIVE_NAMES, OBJECTIVES_GROUP


@dataclass(frozen=True, slots=True)
class Scores:
    """What an objective sees of the N units of a step, with A answers each.

    Of a pair, answer 0 is the chosen and answer 1 the rejected one. For KTO, answer 0 is the completion with the label,
    and answer 1 is another row's completion of the same prompt, which only estimates how far the model has moved.
    """

    logps_NA: np.ndarray
    """float64: Σ w·log p over the targets of each answer; w is the weight of the target's message, 1 if it has none."""
    num_targets_NA: np.ndarray
    """int64: the number of targets of each answer, at least 1."""
    reference_NA: np.ndarray | None
    """float64: as logps_NA, of the reference model. None if the objective needs none."""
    labels_N: np.ndarray
    """int64: 1 for a desirable completion, -1 for an undesirable one; 0 for a pair."""

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit each other, or an answer without targets, with a ValueError."""
        shape = self.logps_NA.shape
        for array in (self.num_targets_NA, self.reference_NA):
            if array is not None and array.shape != shape:
                raise ValueError(f"got an array of shape {array.shape} beside log-probabilities of shape {shape}")
        if self.labels_N.shape != shape[:1]:
            raise ValueError(f"got labels of shape {self.labels_N.shape} for {shape[0]} units")
        if (self.num_targets_NA < 1).any():
            raise ValueError("every answer needs at least one target")


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a step that compares answers: N units, A answers of each."""

    value: float
    """The mean over the units of the step."""
    slopes_NA: np.ndarray
    """∂value/∂logps_NA, float64."""
    metrics: Mapping[str, float]
    """By name, of the whole step; a metric of which the step has no example is absent."""


class Objective(Protocol):
    """A function of the scores of a step. It is deterministic and keeps no state, so that a resumed run is the same."""

    name: str
    answers: int  # per unit: 2, or 1
    num_trained: int  # of the answers, the first ones, which have slopes; those after them need no gradient
    needs_reference: bool

    def __call__(self, scores: Scores, /) -> Loss: ...


# ----------------------------------------------------------------------------------------------------------------------
# Losses of a pair. Each returns its value for each pair, and the slope ∂value/∂score of both scores.

_SIGNS = np.array([1.0, -1.0])  # ∂margin/∂score of the chosen and of the rejected answer


def _logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(−x)), without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def _margin(scores_NA: np.ndarray) -> np.ndarray:
    return scores_NA[:, 0] - scores_NA[:, 1]


def sigmoid(scores_NA: np.ndarray, label_smoothing: float, margin: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """−(1−ε)·log σ(z) − ε·log σ(−z), z = chosen − rejected − margin (Rafailov et al., arXiv 2305.18290, equation 7).

    The smoothed form, ε > 0, is the conservative DPO of Mitchell's note on noisy preferences (2023): a share ε of the
    pairs is taken to be the wrong way round.
    """
    z_N = _margin(scores_NA) - margin
    values_N = (1 - label_smoothing) * np.logaddexp(0, -z_N) + label_smoothing * np.logaddexp(0, z_N)
    slopes_N = label_smoothing * _logistic(z_N) - (1 - label_smoothing) * _logistic(-z_N)
    return values_N, slopes_N[:, None] * _SIGNS


def robust(scores_NA: np.ndarray, label_smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """[−(1−ε)·log σ(z) + ε·log σ(−z)] / (1−2ε), the robust DPO of Chowdhury et al., arXiv 2403.00409.

    If a share ε of the pairs is the wrong way round, its expected value is that of `sigmoid` over the true pairs.
    """
    z_N = _margin(scores_NA)
    values_N = (1 - label_smoothing) * np.logaddexp(0, -z_N) - label_smoothing * np.logaddexp(0, z_N)
    slopes_N = -(1 - label_smoothing) * _logistic(-z_N) - label_smoothing * _logistic(z_N)
    return values_N / (1 - 2 * label_smoothing), (slopes_N / (1 - 2 * label_smoothing))[:, None] * _SIGNS


def hinge(scores_NA: np.ndarray, _: float) -> tuple[np.ndarray, np.ndarray]:
    """max(0, 1 − z) (SLiC: Zhao et al., arXiv 2305.10425; of log-ratios: Liu et al., arXiv 2309.06657)."""
    short_N = 1 - _margin(scores_NA)
    return np.maximum(0, short_N), -(short_N > 0).astype(np.float64)[:, None] * _SIGNS


def apo_zero(scores_NA: np.ndarray, _: float) -> tuple[np.ndarray, np.ndarray]:
    """1 − σ(chosen) + σ(rejected), the APO-zero of D'Oosterlinck et al., arXiv 2408.06266, equation 7."""
    down_NA = _logistic(-scores_NA * _SIGNS)
    return down_NA.sum(axis=1), -down_NA * (1 - down_NA) * _SIGNS


PairLoss = Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero"]
_LOSSES: Mapping[str, Callable[[np.ndarray, float], tuple[np.ndarray, np.ndarray]]] = {
    "sigmoid": sigmoid, "hinge": hinge, "robust": robust, "apo_zero": apo_zero,
}  # fmt: skip


def _loss_of_pairs(
    scores: Scores, values_N: np.ndarray, slopes_NA: np.ndarray, rewards_NA: np.ndarray, logps_NA: np.ndarray,
    sft_weight: float, metrics: Mapping[str, float] | None = None,
) -> Loss:  # fmt: skip
    """Return the mean over the pairs, and sft_weight times the loss of SFT on the chosen answers beside it.

    The loss of SFT is −Σ log p over all chosen targets of the step, divided by their number, so that a step's length
    does not change its weight; `slopes_NA` are ∂values/∂logps of each pair. In the metrics are the given rewards and
    log-probabilities: how they are normalized depends on the objective.
    """
    num_chosen_targets = scores.num_targets_NA[:, 0].sum()
    sft_loss = -scores.logps_NA[:, 0].sum() / num_chosen_targets
    slopes_NA = slopes_NA / len(values_N)
    slopes_NA[:, 0] -= sft_weight / num_chosen_targets
    margins_N = _margin(rewards_NA)
    all_metrics = {
        "reward_margin": margins_N.mean(),
        "reward_accuracy": (margins_N > 0).mean(),
        "chosen_reward": rewards_NA[:, 0].mean(),
        "rejected_reward": rewards_NA[:, 1].mean(),
        "chosen_logp": logps_NA[:, 0].mean(),
        "rejected_logp": logps_NA[:, 1].mean(),
        **({"sft_loss": sft_loss} if sft_weight else {}),
        **(metrics or {}),
    }
    value = float(values_N.mean() + sft_weight * sft_loss)
    return Loss(value, slopes_NA, {name: float(number) for name, number in all_metrics.items()})


def _log_ratios(scores: Scores) -> np.ndarray:
    if scores.reference_NA is None:
        raise ValueError("the objective needs the log-probabilities of the reference model")
    return scores.logps_NA - scores.reference_NA


# ----------------------------------------------------------------------------------------------------------------------
# Objectives. Their fields are their settings, the keys of the section `preference`; the defaults are what auto means.


class _OfPairs:
    answers = 2
    num_trained = 2
    needs_reference = False


@dataclass(frozen=True)
class Dpo(_OfPairs):
    """Direct Preference Optimization (Rafailov et al., arXiv 2305.18290, equation 7) and its variants.

    The mean of loss(β·(c − c₀), β·(r − r₀)). With `ipo`, that of (h − 1/(2β))², h = (c − c₀)/|c| − (r − r₀)/|r| (Azar
    et al., arXiv 2310.12036, equation 17; per target as its authors compute it). With sft_weight > 0 it is the RPO of
    Pang et al., arXiv 2404.19733, equation 1, whose loss of SFT is here divided by the targets of the whole step.

    Rewards are β·(c − c₀) and β·(r − r₀) whatever the loss, log-probabilities are sums.
    """

    loss: PairLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    name = "dpo"
    needs_reference = True

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise ConfigError(f"preference.label_smoothing: got {self.label_smoothing:g}, {self.loss} allows only 0")

    def __call__(self, scores: Scores, /) -> Loss:
        ratios_NA = _log_ratios(scores)
        if self.loss == "ipo":
            excess_N = _margin(ratios_NA / scores.num_targets_NA) - 1 / (2 * self.beta)
            values_N, slopes_NA = excess_N**2, 2 * excess_N[:, None] * _SIGNS / scores.num_targets_NA
        else:
            values_N, slopes_NA = _LOSSES[self.loss](self.beta * ratios_NA, self.label_smoothing)
            slopes_NA = self.beta * slopes_NA
        return _loss_of_pairs(scores, values_N, slopes_NA, self.beta * ratios_NA, scores.logps_NA, self.sft_weight)


@dataclass(frozen=True)
class Cpo(_OfPairs):
    """Contrastive Preference Optimization (Xu et al., arXiv 2401.08417, equation 3).

    The mean of −log σ(β·(c − r)), plus the loss of SFT on the chosen answers, per target of the step instead of per
    pair. Rewards are β·c and β·r, log-probabilities are sums.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 1.0

    name = "cpo"

    def __call__(self, scores: Scores, /) -> Loss:
        rewards_NA = self.beta * scores.logps_NA
        values_N, slopes_NA = sigmoid(rewards_NA, self.label_smoothing)
        return _loss_of_pairs(scores, values_N, self.beta * slopes_NA, rewards_NA, scores.logps_NA, self.sft_weight)


@dataclass(frozen=True)
class SimPo(_OfPairs):
    """Simple Preference Optimization (Meng et al., arXiv 2405.14734, equation 6): −log σ(β·c/|c| − β·r/|r| − γ).

    Without a γ it is half of β. With sft_weight > 0 it is what is called CPO-SimPO. Rewards are β·c/|c| and β·r/|r|,
    log-probabilities are per target.
    """

    beta: float = 2.0
    gamma: float | None = None
    sft_weight: float = 0.0

    name = "simpo"

    def __call__(self, scores: Scores, /) -> Loss:
        logps_NA = scores.logps_NA / scores.num_targets_NA
        gamma = self.beta / 2 if self.gamma is None else self.gamma
        values_N, slopes_NA = sigmoid(self.beta * logps_NA, 0.0, gamma)
        slopes_NA = self.beta * slopes_NA / scores.num_targets_NA
        return _loss_of_pairs(scores, values_N, slopes_NA, self.beta * logps_NA, logps_NA, self.sft_weight)


_NEAR_ONE = -1e-7  # the largest log-probability with odds: float32 knows none between it and 0


@dataclass(frozen=True)
class Orpo(_OfPairs):
    """Odds Ratio Preference Optimization (Hong et al., arXiv 2403.07691, equations 4, 6 and 7).

    The loss of SFT on the chosen answers, plus β (the paper's λ) times the mean of −log σ(log odds(Pc) − log odds(Pr)),
    where log P is c/|c| or r/|r|, and odds(P) = P/(1 − P). Rewards are β·log P, log-probabilities are per target.
    """

    beta: float = 0.1
    sft_weight: float = 1.0

    name = "orpo"

    def __call__(self, scores: Scores, /) -> Loss:
        logps_NA = np.minimum(scores.logps_NA / scores.num_targets_NA, _NEAR_ONE)
        rest_NA = -np.expm1(logps_NA)  # 1 − P
        log_odds_NA = logps_NA - np.log(rest_NA)
        values_N, slopes_NA = sigmoid(log_odds_NA, 0.0)
        slopes_NA = self.beta * slopes_NA / rest_NA / scores.num_targets_NA  # ∂log odds/∂log P = 1/(1 − P)
        metrics = {"log_odds": _margin(log_odds_NA).mean()}
        return _loss_of_pairs(
            scores, self.beta * values_N, slopes_NA, self.beta * logps_NA, logps_NA, self.sft_weight, metrics
        )


@dataclass(frozen=True)
class Kto:
    """Kahneman-Tversky Optimization (Ethayarajh et al., arXiv 2402.01306, equation 7).

    The mean of w·(1 − σ(s·β·(c − c₀ − KL))), where c is a completion's Σ log p, s is 1 if it is desirable, else -1, and
    w the weight of its kind. KL = max(0, the mean of c − c₀ over answers 1 of the step); it has no gradient. Rewards
    are β·(c − c₀), of the desirable completions (chosen) and of the others (rejected); log-probabilities are sums.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    name = "kto"
    answers = 2
    num_trained = 1
    needs_reference = True

    def __call__(self, scores: Scores, /) -> Loss:
        signs_N = scores.labels_N
        if not (abs(signs_N) == 1).all():
            raise ValueError("every row of kto needs the label 1 or -1")
        ratios_NA = _log_ratios(scores)
        kl = max(0.0, ratios_NA[:, 1].mean())
        weights_N = np.where(signs_N > 0, self.desirable_weight, self.undesirable_weight)
        down_N = _logistic(-self.beta * signs_N * (ratios_NA[:, 0] - kl))
        slopes_NA = np.zeros_like(ratios_NA)
        slopes_NA[:, 0] = -self.beta * weights_N * signs_N * down_N * (1 - down_N) / len(signs_N)
        metrics = {"kl": float(kl)}
        for kind, rows in (("chosen", signs_N > 0), ("rejected", signs_N < 0)):
            if rows.any():
                metrics[f"{kind}_reward"] = self.beta * float(ratios_NA[rows, 0].mean())
                metrics[f"{kind}_logp"] = float(scores.logps_NA[rows, 0].mean())
        if {"chosen_reward", "rejected_reward"} <= metrics.keys():
            metrics["reward_margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        return Loss(float((weights_N * down_N).mean()), slopes_NA, metrics)


OBJECTIVES: Mapping[str, Callable[..., Objective]] = {kind.name: kind for kind in (Dpo, Orpo, SimPo, Cpo, Kto)}


def objective_of(name: str, **settings: Any) -> Objective:
    """Return the objective of this name in OBJECTIVES. Its settings are its fields; "auto" leaves the default."""
    return OBJECTIVES[name](**{key: value for key, value in settings.items() if value != "auto"})


_PARTS = ("name", "answers", "num_trained", "needs_reference", "__call__")


def installed_objective(name: str) -> Callable[[Config], Objective]:
    """Return what makes the objective of this name: an entry point of the group `dualtune.objectives`.

    It names a callable that gets the `Config` and returns an `Objective`, such as a class. ConfigError if there is
    none, or if it cannot be used.
    """
    return installed(
        OBJECTIVES_GROUP, name, key="train.objective", others=OBJECTIVE_NAMES, parts=_PARTS,
        page="docs/objectives.md", fault_of=_fault_of,
    )  # fmt: skip


def _fault_of(made: Objective) -> str:
    if made.answers in (1, 2) and 1 <= made.num_trained <= made.answers:
        return ""
    got = f"answers = {made.answers!r}, num_trained = {made.num_trained!r}"
    return f"has {got}; allowed: 1 or 2 answers, of which at least one is trained"
