"""The learning rate that is usual for a config: that of LoRA on plain targets, made smaller by what needs less.

Measured on SmolLM2-135M-Instruct: the factors of the objectives (benchmarks/preference.py) and of a whole model, which
at 3e-4 already learns less than LoRA at 1e-3 (benchmarks/quality.py; thinkingmachines.ai/blog/lora has the same rule).
That of pissa and olora is measured there too: at a fifth pissa learns what LoRA learns, at LoRA's own rate far less. Of
lion only its paper's range is known, 3 to 10 (arXiv 2302.06675); of samples that ten times a whole model's rate of 1e-6
is usual, which is TRL's default of GRPO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualtune.config.schema import Config, TrainConfig
from dualtune.config.values import ON_POLICY, POLICY_OBJECTIVES

# What divides the rate, and why. Optimizers and objectives that are not here get no advice: their rates have
# another scale, as those of sgd, or are another package's.
OPTIMIZERS = {
    "adamw": (1, ""), "adamw_8bit": (1, ""), "adafactor": (1, ""), "muon": (1, ""),
    **dict.fromkeys(("lion", "lion_8bit"), (5, "lion moves every weight by the whole rate")),
}  # fmt: skip
OBJECTIVES = {
    "sft": (1, ""), "distill": (1, ""), ON_POLICY: (1, ""), "orpo": (2, "orpo adds a comparison to the loss of sft"),
    **dict.fromkeys(("dpo", "kto", "simpo", "cpo"), (10, "comparing answers soon makes all of them improbable")),
    **dict.fromkeys(POLICY_OBJECTIVES, (20, "a reward says little of an answer")),
}  # fmt: skip
WHOLE = (10, "a whole model takes a tenth of LoRA's rate")
STARTS: dict[str, tuple[int, str]] = dict.fromkeys(
    ("pissa", "olora"), (5, "it starts in the weight itself, not at zero")
)
FAR = 10  # times the usual rate


@dataclass(frozen=True)
class UsualRate:
    """A learning rate, and why it is not that of LoRA on plain targets; no reasons if it is."""

    rate: float
    reasons: tuple[str, ...]


def usual_rate(config: Config) -> UsualRate | None:
    """Return the peak learning rate to begin with. None for an unknown optimizer or objective."""
    if (divisors := _divisors(config)) is None:
        return None
    default: float = TrainConfig.model_fields["learning_rate"].default
    rate = default / math.prod(factor for factor, _ in divisors)
    return UsualRate(float(f"{rate:.1g}"), tuple(why for _, why in divisors if why))


def with_usual_rate(config: Config) -> Config:
    """Return the config with the usual learning rate, if it names none and one is known."""
    usual = None if "learning_rate" in config.train.model_fields_set else usual_rate(config)
    if usual is None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": usual.rate})})


def divisor_of_rate(config: Config) -> int | None:
    """Return what divides the rate of LoRA on plain targets. None as for `usual_rate`."""
    divisors = _divisors(config)
    return None if divisors is None else math.prod(factor for factor, _ in divisors)


def _divisors(config: Config) -> list[tuple[int, str]] | None:
    """Return what divides the rate of LoRA on plain targets, each with its reason."""
    train, adapter = config.train, config.adapter
    if train.optimizer not in OPTIMIZERS or train.objective not in OBJECTIVES:
        return None
    start = WHOLE if adapter.trains_model else STARTS.get(adapter.init, (1, ""))
    return [OBJECTIVES[train.objective], OPTIMIZERS[train.optimizer], start]


def far_rate(config: Config) -> str | None:
    """Return a note on a learning rate far above a usual one that is lower than plain LoRA's. None: it is not.

    Plain LoRA gets no note, because a small model takes ten times the default.
    """
    usual, rate = usual_rate(config), config.train.learning_rate
    if usual is None or not usual.reasons or rate < FAR * usual.rate:
        return None
    return (
        f"train.learning_rate {rate:g} is {rate / usual.rate:.0f} times what is usual for this config, {usual.rate:g}: "
        f"{'; '.join(usual.reasons)}"
    )
