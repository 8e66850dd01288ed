"""Objectives that learn from the model's own samples: GRPO and its variants, and RLOO, as NumPy functions.

Each gets log-probabilities of the tokens that a step has sampled, and returns its value and the slope ∂value/∂(log p)
of each token. By the chain rule the gradient of the step is that of the engine's own loss, Σ −w·log p, with the weight
−slope, so no engine knows any of them.

In the equations, A is the advantage of a sample, ρ = p / p_old the ratio of a token's probability now to that when it
was sampled, |o| the number of tokens of a sample.
Shape suffixes: P prompts, G samples of each, N = P·G samples, M tokens of all of them, one sample after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

# ----------------------------------------------------------------------------------------------------------------------
# Advantages.

Scale = Literal["group", "step", "none"]
LEAST_DEVIATION = 1e-4  # added to a deviation, as in TRL


def advantages(rewards_PG: np.ndarray, scale: Scale, *, leave_one_out: bool = False) -> np.ndarray:
    """Return by how much each sample is better than those of the same prompt, float64 [P, G].

    The mean reward of the group is subtracted, or of the others in it (`leave_one_out`: Kool et al., 2019), and the
    difference divided by the standard deviation of the group or of the step, or by nothing. A reward that is not known
    is NaN: such a sample has the advantage 0, and the others are compared without it.
    """
    finite_PG = np.isfinite(rewards_PG)
    counts_P1 = finite_PG.sum(1, keepdims=True)
    values_PG = np.where(finite_PG, rewards_PG, 0.0)
    means_P1 = values_PG.sum(1, keepdims=True) / np.maximum(counts_P1, 1)
    differences_PG = np.where(finite_PG & (counts_P1 > 1), values_PG - means_P1, 0.0)
    if leave_one_out:  # r − mean of the others = (r − mean) · n / (n − 1)
        differences_PG = differences_PG * counts_P1 / np.maximum(counts_P1 - 1, 1)
    if scale == "none":
        return differences_PG
    if scale == "group":
        variances_P1 = (differences_PG**2).sum(1, keepdims=True) / np.maximum(counts_P1 - 1, 1)
        return differences_PG / (np.sqrt(variances_P1) + LEAST_DEVIATION)
    deviation = np.std(rewards_PG[finite_PG], ddof=1) if finite_PG.sum() > 1 else 0.0
    return differences_PG / (deviation + LEAST_DEVIATION)


# ----------------------------------------------------------------------------------------------------------------------
# Losses.


GAP = "logprob_gap"  # the metric: by how much log p differs from that when the tokens were sampled


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What an objective sees of the samples of a step."""

    logps_M: np.ndarray
    """float64: log p of each token now, with the dropout of the step."""
    old_M: np.ndarray
    """float64: the same when it was sampled."""
    lengths_N: np.ndarray
    """int64: the number of tokens of each sample, at least 1."""
    advantages_N: np.ndarray
    """float64."""
    reference_M: np.ndarray | None = None
    """float64: the same as logps_M, of the reference model. None if the model is not tied to one."""

    @property
    def starts_N(self) -> np.ndarray:
        return np.cumsum(self.lengths_N) - self.lengths_N

    def of_samples(self, values_M: np.ndarray) -> np.ndarray:
        """Return the sum over the tokens of each sample, [N]."""
        return np.add.reduceat(values_M, self.starts_N)

    def of_tokens(self, values_N: np.ndarray) -> np.ndarray:
        """Return the value of each token's sample, [M]."""
        return np.repeat(values_N, self.lengths_N)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of a step on samples, M tokens of them."""

    value: float
    slopes_M: np.ndarray
    """∂value/∂logps_M, float64."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """One of the losses, with its constants. A ratio counts between 1 − clip_low and 1 + clip_high."""

    name: str
    ratio: Literal["token", "mean", "product"]
    """Of a token; or the sequence's: the geometric mean of its tokens' (GSPO), or their product."""
    weights: Literal["samples", "tokens", "limit"]
    """Samples count alike, or tokens do; or tokens do beside the largest number that the samples may have."""
    scale: Scale
    clip_low: float
    clip_high: float
    leave_one_out: bool = False
    stops_at_clip: bool = True
    """Whether a ratio beyond the limit has no gradient; else its token counts by the limit (CISPO)."""
    kl: float = 0.0
    """The weight of the KL divergence from the reference."""

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence is subtracted from the reward, not added to the loss."""
        return self.leave_one_out

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        """Return the advantages of a step's samples, float64 [N]."""
        return advantages(rewards_PG, self.scale, leave_one_out=self.leave_one_out).ravel()

    def __call__(self, tokens: SampledTokens, max_tokens: int, num_tokens: int, num_samples: int) -> PolicyLoss:
        """Return the loss over the samples of a step.

        Those without an advantage may be absent; `num_tokens` and `num_samples` count them too, and `max_tokens` is the
        largest number of tokens that a sample may have.
        """
        log_ratios_M = tokens.logps_M - tokens.old_M
        values_M, slopes_M, clipped = self._per_token(tokens, log_ratios_M)
        weights_M = {
            "samples": tokens.of_tokens(1 / (num_samples * tokens.lengths_N)),
            "tokens": np.full(len(values_M), 1 / num_tokens),
            "limit": np.full(len(values_M), 1 / (num_samples * max_tokens)),
        }[self.weights]
        metrics = {GAP: float(np.abs(log_ratios_M).mean()), **clipped}
        if tokens.reference_M is not None and not self.kl_in_reward:
            # Schulman's estimate k3 = q/p − log(q/p) − 1, which is never negative.
            behind_M = tokens.reference_M - tokens.logps_M
            kl_M = np.exp(behind_M) - behind_M - 1
            values_M, slopes_M = values_M + self.kl * kl_M, slopes_M + self.kl * (1 - np.exp(behind_M))
            metrics["kl"] = float(kl_M.mean())
        return PolicyLoss(float((weights_M * values_M).sum()), weights_M * slopes_M, metrics)

    def _per_token(
        self, tokens: SampledTokens, log_ratios_M: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Return value and slope of each token, and which share of the ratios is clipped."""
        if self.ratio == "token":
            ratios, advantages_ = np.exp(log_ratios_M), tokens.of_tokens(tokens.advantages_N)
        else:
            sums_N = tokens.of_samples(log_ratios_M)
            ratios = np.exp(sums_N / tokens.lengths_N if self.ratio == "mean" else sums_N)
            advantages_ = tokens.advantages_N
        low, high = 1 - self.clip_low, 1 + self.clip_high
        clipped = {
            "clip_low": float(((ratios < low) & (advantages_ < 0)).mean()),
            "clip_high": float(((ratios > high) & (advantages_ > 0)).mean()),
        }
        if not self.stops_at_clip:
            slopes = -np.minimum(ratios, high) * advantages_
            return slopes * tokens.logps_M, slopes, clipped
        plain, limited = ratios * advantages_, np.clip(ratios, low, high) * advantages_
        values, slopes = -np.minimum(plain, limited), np.where(plain <= limited, -plain, 0.0)
        if self.ratio == "token":
            return values, slopes, clipped
        # A sequence's ratio is a function of all its tokens, and its value that of each: their weights add up.
        by_token_N = slopes * tokens.lengths_N if self.ratio == "product" else slopes
        return tokens.of_tokens(values), tokens.of_tokens(by_token_N), clipped


OBJECTIVES: Mapping[str, PolicyObjective] = {
    objective.name: objective
    for objective in (
        # Shao et al., arXiv 2402.03300, equation 3: the mean over the tokens of a sample, then over the samples.
        PolicyObjective("grpo", "token", "samples", "group", 0.2, 0.2),
        # Liu et al., arXiv 2503.20783: without the deviation and the sample's own length, which are biases.
        PolicyObjective("dr_grpo", "token", "limit", "none", 0.2, 0.2),
        # Yu et al., arXiv 2503.14476: clip-higher and the mean over tokens; not its dynamic sampling.
        PolicyObjective("dapo", "token", "tokens", "group", 0.2, 0.28),
        # Zheng et al., arXiv 2507.18071, equation 5: the ratio of sequences.
        PolicyObjective("gspo", "mean", "samples", "group", 3e-4, 4e-4),
        # MiniMax-M1, arXiv 2506.13585, equation 4: a clipped ratio weights the gradient and does not stop it.
        PolicyObjective("cispo", "token", "tokens", "group", 1.0, 4.0, stops_at_clip=False),
        # Ahmadian et al., arXiv 2402.14740, with a clipped ratio as in TRL.
        PolicyObjective("rloo", "product", "samples", "none", 0.2, 0.2, leave_one_out=True),
    )
}
