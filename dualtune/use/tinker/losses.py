"""The losses of the Tinker API, as NumPy functions of the log-probabilities of a datum's targets.

Each returns the loss of every target and its slope ∂loss/∂(log p), float64. The loss of a call is the sum over all
targets of all data. By the chain rule its gradient is that of the engine's own loss, Σ −w·log p, with the weight
−slope, so no engine knows any of them. The formulas are those of https://tinker-docs.thinkingmachines.ai/tinker/losses.

In the equations p is the probability of a target now, q that when it was sampled, ρ = p / q, and A the advantage.
Shape suffixes: T targets of a datum, or [T, K] with K targets in each place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dualtune.base.errors import ConfigError

Inputs = Mapping[str, np.ndarray]  # of a datum, float64 [T], and the constants of the loss, []
Formula = Callable[[np.ndarray, Inputs], tuple[np.ndarray, np.ndarray]]


def cross_entropy(logps_T: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """−w · log p. Weights may be negative: a client's own loss arrives as the weights −∂loss/∂(log p)."""
    return -inputs["weights"] * logps_T, -inputs["weights"]


def importance_sampling(logps_T: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """−ρ · A."""
    values_T = -_times(np.exp(logps_T - inputs["logprobs"]), inputs["advantages"])
    return values_T, values_T


def ppo(logps_T: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """−min(ρ · A, clip(ρ) · A): Schulman et al., arXiv 1707.06347, equation 7."""
    return _clipped(np.exp(logps_T - inputs["logprobs"]), inputs)


def gspo(logps_T: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The same with the geometric mean of the ρ of a sequence in the place of each: GSPO-token, arXiv 2507.18071.

    The mean is over the targets that sequence_ratio_mask marks. Each target has the gradient of its own log p alone.
    """
    is_in_ratio_T = inputs["sequence_ratio_mask"] != 0
    if not is_in_ratio_T.any():
        raise ConfigError("sequence_ratio_mask: marks no target. Set it to 1 for the tokens that were sampled")
    log_ratio = (logps_T - inputs["logprobs"])[is_in_ratio_T].mean()
    return _clipped(np.full(logps_T.shape, np.exp(log_ratio)), inputs)


def cispo(logps_T: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """−clip(ρ) · A · log p, where clip(ρ) is a constant: MiniMax-M1, arXiv 2506.13585, equation 4."""
    slopes_T = -_times(_clip(np.exp(logps_T - inputs["logprobs"]), inputs), inputs["advantages"])
    return slopes_T * logps_T, slopes_T


def dro(logps_T: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """−(A · log p − β/2 · (log ρ)²): Richemond et al., arXiv 2405.19107."""
    log_ratios_T, beta = logps_T - inputs["logprobs"], inputs["beta"]
    values_T = inputs["advantages"] * logps_T - beta / 2 * log_ratios_T**2
    return -values_T, beta * log_ratios_T - inputs["advantages"]


def _clip(ratios_T: np.ndarray, inputs: Inputs) -> np.ndarray:
    return np.clip(ratios_T, inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def _clipped(ratios_T: np.ndarray, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return −min(ρ · A, clip(ρ) · A) and its slope, where ρ has the slope ρ."""
    plain_T = _times(ratios_T, inputs["advantages"])
    limited_T = _times(_clip(ratios_T, inputs), inputs["advantages"])
    return -np.minimum(plain_T, limited_T), np.where(plain_T <= limited_T, -plain_T, 0.0)


def _times(ratios_T: np.ndarray, advantages_T: np.ndarray) -> np.ndarray:
    """Return the product; 0 without an advantage, though the ratio of such a token may be infinite."""
    return np.where(advantages_T == 0, 0.0, ratios_T * advantages_T)


@dataclass(frozen=True, slots=True)
class TargetLoss:
    """A loss with what it reads of a datum beside target_tokens, and its constants."""

    formula: Formula
    needs: tuple[str, ...]
    constants: Mapping[str, float | None]  # of loss_fn_config, by default; None: there is no default
    allows: Mapping[str, float]  # inputs that a datum may lack, and what they are then
    takes_several: bool = False  # whether a place may have several targets
    factor: str | None = "advantages"  # an input, where it is 0 the loss has no slope


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, TargetLoss] = {
    "cross_entropy": TargetLoss(cross_entropy, (), {}, {"weights": 1.0}, takes_several=True, factor="weights"),
    "importance_sampling": TargetLoss(importance_sampling, _SAMPLED, {}, {}),
    "ppo": TargetLoss(ppo, _SAMPLED, _CLIP, {}),
    "cispo": TargetLoss(cispo, _SAMPLED, _CLIP, {}),
    "gspo": TargetLoss(
        gspo, (*_SAMPLED, "sequence_ratio_mask"), {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}, {}
    ),
    "dro": TargetLoss(dro, _SAMPLED, {"beta": None}, {}, factor=None),
}


def check_loss(name: str, config: Mapping[str, float | str]) -> TargetLoss:
    """Return the loss of this name. ConfigError if there is none, or for a constant that it does not have."""
    if name == "stable_reinforce":
        raise ConfigError("loss_fn: got 'stable_reinforce', whose formula is not public. Use 'importance_sampling'")
    if name not in LOSSES:
        others = "; a loss of your own: forward_backward_custom with a function, which runs in the client"
        raise ConfigError(f"loss_fn: got '{name[:100]}', allowed: {', '.join(LOSSES)}{others}")
    loss = LOSSES[name]
    if unknown := sorted(config.keys() - loss.constants.keys()):
        allowed = ", ".join(loss.constants) or "nothing"
        raise ConfigError(f"loss_fn_config: got {unknown[0][:100]}, {name} has: {allowed}")
    for key, value in config.items():
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise ConfigError(f"loss_fn_config: {key}: got {value!r:.100}, allowed: a finite number")
    if missing := [key for key, value in loss.constants.items() if value is None and key not in config]:
        raise ConfigError(f"loss_fn_config: {name} needs {missing[0]}, which has no default")
    return loss


def check_inputs(name: str, index: int, inputs: Inputs) -> None:
    """Raise ConfigError unless a datum has what the loss reads, in the shape of its targets, and nothing else.

    Its constants may be there too, for each target.
    """
    loss, shape = LOSSES[name], inputs["target_tokens"].shape if "target_tokens" in inputs else ()
    where = f"data[{index}].loss_fn_inputs"
    if missing := [key for key in ("target_tokens", *loss.needs) if key not in inputs]:
        raise ConfigError(f"{where}: {name} needs {missing[0]}")
    allowed = ("target_tokens", *loss.needs, *loss.allows, *loss.constants)
    if unknown := sorted(inputs.keys() - {*allowed}):
        raise ConfigError(f"{where}: got {unknown[0][:100]}, {name} reads: {', '.join(allowed)}")
    if len(shape) != 1 and not (loss.takes_several and len(shape) == 2 and shape[1] > 0):
        shapes = "[T] or [T, K]" if loss.takes_several else "[T]"
        raise ConfigError(f"{where}: target_tokens has the shape {[*shape]}, allowed for {name}: {shapes}")
    for key, values in inputs.items():
        if values.shape != shape:
            raise ConfigError(f"{where}: {key} has the shape {[*values.shape]}, and target_tokens {[*shape]}")
        if not np.isfinite(values).all():
            raise ConfigError(f"{where}: {key} holds NaN or Inf")


def may_have_slope(name: str, inputs: Inputs) -> np.ndarray:
    """Return whether the loss of each target of a datum may have a slope, whatever the model says of it, bool."""
    factor = LOSSES[name].factor
    if factor is None or factor not in inputs:
        return np.ones(inputs["target_tokens"].shape, bool)
    return inputs[factor] != 0


def loss_of(
    name: str, logps_T: np.ndarray, inputs: Inputs, config: Mapping[str, float | str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each target of a datum and its slope, float64, in the shape of its targets.

    Loss, config and inputs were checked.
    """
    loss = LOSSES[name]
    constants = {**loss.allows, **loss.constants, **config}
    arrays = {key: np.asarray(value, np.float64) for key, value in {**constants, **inputs}.items()}
    with np.errstate(over="ignore", invalid="ignore"):
        values_T, slopes_T = loss.formula(logps_T.astype(np.float64), arrays)
    return np.broadcast_to(values_T, logps_T.shape), np.broadcast_to(slopes_T, logps_T.shape)
