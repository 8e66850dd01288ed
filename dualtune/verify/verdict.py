"""The verdict from the gaps: the same function, a wrong base, a broken adapter, or a difference of precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dualtune.evaluate.fingerprints import Effect, Gap
from dualtune.verify.identity import ComparedPart, Fit
from dualtune.verify.thresholds import Limit, Precision

Kind = Literal["same", "precision-gap", "wrong-base", "broken-adapter", "nothing-recorded"]
NO_EFFECT, OTHER_EFFECT = 0.1, 0.25  # limits for the hints at a cause: of the size, and of its distance from 1


@dataclass(frozen=True, slots=True)
class Function:
    """The recomputed numbers, and their limits."""

    recorded: Precision
    here: Precision
    pair: str  # the row of thresholds.TABLE
    limit: Limit | None  # of the base; None: this pair was not measured
    adapter_limit: Limit | None
    base: Gap
    adapter: Gap
    effect: Effect | None  # None: the recorded adapter has no visible effect
    idle: bool  # the adapter's effect is too small to check: the base without it is as near to the adapter's record


class VerifyVerdict(NamedTuple):
    kind: Kind
    ok: bool  # the same function, within the precisions
    sentence: str


def within(found: Gap, limit: Limit) -> bool:
    return found.kl <= limit.kl and found.logprob <= limit.logprob and found.top1 >= limit.top1


def effect_is_within(found: Effect | None, limit: Limit) -> bool:
    return limit.effect is None or found is None or found.error <= limit.effect


def judge(parts: Sequence[ComparedPart], fit: Fit, function: Function) -> VerifyVerdict:
    """Return the verdict on a compared base and an adapter that fits its shapes."""
    differing = [part for part in parts if part.state == "differs"]
    # config and weights are files: only the computation shows whether another file is another model.
    decisive = [part for part in differing if part.name in ("tokenizer", "template")]
    files = [part for part in differing if part.name in ("config", "weights")]
    limit, adapter_limit = function.limit, function.adapter_limit
    same_base = function.recorded.quantization == function.here.quantization
    if decisive:
        return _wrong_base(decisive + files, "it encodes texts differently than in training")
    if limit is None or adapter_limit is None:
        text = f"there is no measured limit for {function.pair}. {_advice(function.recorded)}"
        return VerifyVerdict("precision-gap", False, text)
    if not within(function.base, limit):
        if files:
            return _wrong_base(files, "it computes different values")
        if function.recorded == function.here:
            text = "its sampled hashes agree, but it computes different values: weights that were not sampled differ"
            return _wrong_base([], f"{text}, or this machine computes differently")
        text = f"even without the adapter it differs more than {function.pair} explains. {_advice(function.recorded)}"
        return VerifyVerdict("precision-gap", False, f"the base is the same in another precision, but {text}")
    if [part for part in files if part.name == "weights"] and not same_base:
        return _wrong_base(
            files, f"the limits of {function.pair} are too wide to show if other weights compute the same"
        )
    if not (within(function.adapter, adapter_limit) and effect_is_within(function.effect, adapter_limit)):
        return VerifyVerdict("broken-adapter", False, _broken(fit, function))
    if function.recorded == function.here:
        return VerifyVerdict(
            "same", True, f"the same function, within the limits of {function.pair}{_doubts(function)}"
        )
    text = f"the same function up to precision: recorded as {function.recorded}, here {function.here}; base and adapter"
    return VerifyVerdict(
        "precision-gap", True, f"{text} differ no more than {function.pair} explains{_doubts(function)}"
    )


def does_not_fit(parts: Sequence[ComparedPart], fit: Fit) -> VerifyVerdict:
    """Return the verdict on an adapter that does not fit the shapes of the base: nothing needs to be computed."""
    files = [part for part in parts if part.state == "differs"]
    shown = "; ".join(fit.problems[:3]) + (f" and {len(fit.problems) - 3} more" if len(fit.problems) > 3 else "")
    if files or any(part.name == "weights" and part.state == "unknown" for part in parts):
        return _wrong_base(files, f"the adapter does not fit it: {shown}")
    return VerifyVerdict(
        "broken-adapter", False, f"the base is the recorded one, but the adapter does not fit it: {shown}"
    )


def _wrong_base(parts: Sequence[ComparedPart], why: str) -> VerifyVerdict:
    names = ", ".join(f"{part.name} ({part.found})" for part in parts)
    differs = f" It differs in {names}." if parts else ""
    return VerifyVerdict("wrong-base", False, f"this is not the base that the adapter was trained on: {why}.{differs}")


def _broken(fit: Fit, function: Function) -> str:
    found = ["the base computes the recorded values, but the adapter does not"]
    if function.effect is not None:
        size = function.effect.size
        found.append(f"its effect is {size:.2f} times the recorded one, with an error of {function.effect.error:.0%}")
        if abs(size) < NO_EFFECT:
            found.append("it does nothing: B is zero, or its tensors are not applied")
        elif abs(size - 1) > OTHER_EFFECT:
            found.append("check alpha / rank (mlx-lm: scale)")
    if fit.missing:
        found.append(f"{len(fit.missing)} modules that its config targets have no tensors, such as {fit.missing[0]}")
    return f"{'; '.join(found)}. Copy it again from the machine of the training, without converting it"


def _doubts(function: Function) -> str:
    """Return what a good verdict does not prove."""
    if function.idle:
        text = (
            ". But the adapter's effect is too small to check: without the adapter, the base is as close to the "
            "recorded values"
        )
        return text if function.recorded == function.here else f"{text}. {_advice(function.recorded)}"
    if function.recorded.quantization != function.here.quantization:
        return f". A gap this wide can hide damage to single modules. {_advice(function.recorded)} to see it"
    return ""


def _advice(recorded: Precision) -> str:
    return f"Verify with {recorded.options}"
