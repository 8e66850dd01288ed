"""The verdict on an adapter and its base: the recorded training, what may differ from it, and what a difference means.

The same function, a wrong base, a broken adapter, or a difference of precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

from dualtune.base import fields
from dualtune.base.errors import FormatError
from dualtune.train.fingerprints import Effect, Entry, Gap
from dualtune.use.verify.identity import ComparedPart, Fit

# ----------------------------------------------------------------------------------------------------------------------
# The record of a model and its adapter in dualtune.json, validated: the file is not trusted.

MAX_ENTRIES, MAX_TOKENS, MAX_TOP = 64, 4096, 1024  # far more than dualtune writes
MAX_ID = 1 << 31
MIN_LOGPROB, MAX_LOGPROB = -1e6, 1e-3  # 0 with room for rounding


@dataclass(frozen=True, slots=True)
class Recorded:
    """The part of dualtune.json that can be recomputed or compared."""

    base_model: Mapping[str, Any]  # its name and hashes
    training: Mapping[str, Any]
    base: list[Entry]  # without the adapter
    adapter: list[Entry]  # with the adapter, for the same tokens
    precision: Precision


def recorded_in(manifest: Mapping[str, Any], where: object) -> Recorded | None:
    """Return the record in a manifest, None if there is none. FormatError if it is malformed."""
    fingerprints = fields.subtable(manifest, "fingerprints", where)
    if not fingerprints:
        return None
    base, adapter = (_entries(fingerprints.get(key), f"{where}: fingerprints.{key}") for key in ("base", "adapter"))
    if [(e["tokens"], _num_tops(e)) for e in base] != [(e["tokens"], _num_tops(e)) for e in adapter]:
        raise FormatError(f"{where}: fingerprints: base and adapter were not recorded for the same tokens")
    model = fields.subtable(manifest, "base", where)
    if len(dtypes := {str(entry.get("dtype")) for entry in (*base, *adapter)}) > 1:
        raise FormatError(f"{where}: fingerprints: dtype: got {', '.join(sorted(dtypes))}, must be the same for all")
    precision = Precision(fields.name(model, "loaded_as", where) or "none", fields.name(base[0], "dtype", where))
    return Recorded(model, fields.subtable(manifest, "training", where), base, adapter, precision)


def _entries(value: Any, where: str) -> list[Entry]:
    """Parse at least one entry, each with tokens and the most probable next tokens."""
    if not _is_list(value, MAX_ENTRIES, _is_entry):
        raise FormatError(f"{where}: malformed. Copy the directory again from where it was trained")
    return value


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    entry = cast(Entry, value)
    tokens, earlier = entry.get("tokens", []), entry.get("earlier", [])
    return (
        _is_list(tokens, MAX_TOKENS, _is_id)
        and _is_top(entry.get("top"))
        and (earlier == [] or _is_list(earlier, len(tokens) - 1, _is_top))
        and isinstance(entry.get("prompt", ""), str)
        and isinstance(entry.get("dtype", ""), str)
    )


def _is_top(value: Any) -> bool:
    """Return whether a value is [[id, log p], …]."""
    return _is_list(value, MAX_TOP, _is_pair)


def _is_pair(value: Any) -> bool:
    return (
        _is_list(value, 2, lambda x: type(x) in (int, float))
        and len(value) == 2
        and _is_id(value[0])
        and MIN_LOGPROB <= value[1] <= MAX_LOGPROB
    )


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_ID


def _is_list(value: Any, longest: int, is_item: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list of 1 to `longest` such items."""
    if not isinstance(value, list):
        return False
    items = cast(list[Any], value)
    return 1 <= len(items) <= longest and all(map(is_item, items))


def _num_tops(entry: Entry) -> int:
    return len(entry.get("earlier", ())) + 1


# ----------------------------------------------------------------------------------------------------------------------
# Limits for the difference between two computations of the same model, by the precisions of both.
#
# The measured numbers are maxima over a pretrained model of 260 thousand weights (stories260k) and a random one of 120
# thousand, each with a strong and a weak adapter, torch and MLX on a CPU, both directions, base and adapter: `pytest
# tests/transfer/test_verify_thresholds.py -s` measures most of them again. No large model has been measured;
# quantization hurts small models more than large ones, so these limits are rather too wide. A limit is three times the
# measured number, in float32 more, because larger models round more often. int8 was measured with a strong adapter of
# the pretrained model alone; its limits are those of affine8, which has as many bits.

DTYPES = ("float32", "float16", "bfloat16")
# Rounding to 16 bits changes the effect of an adapter by up to 0.18 nats (root mean square; stories260k, bfloat16 on a
# quantized base). An adapter with less than four times this effect is not judged by it.
MIN_EFFECT_IN_16_BITS = 0.7
# The base without the adapter is the control: it shows the effect of precision on this model. The adapter's KL may be
# four times the base's (measured: 1.9 times, between the maxima of each row), or a fiftieth of the row if that is more.
CONTROL, MIN_SHARE = 4.0, 0.02


@dataclass(frozen=True, slots=True)
class Precision:
    """How a base model was loaded: "none" or the name of a quantization, and the dtype of the computation."""

    quantization: str
    dtype: str | None  # None: an older dualtune did not record it

    @property
    def options(self) -> str:
        """The options of `dualtune verify` for this precision."""
        dtype = f" --dtype {self.dtype}" if self.dtype in DTYPES else ""
        if not self.quantization.isidentifier():  # it has no name, so only a stored model can have it
            return f"a --base that is stored as {self.quantization}" + (dtype and f", and{dtype}")
        return f"--quantization {self.quantization}{dtype}"

    @property
    def is_16_bit(self) -> bool:
        return self.dtype in ("float16", "bfloat16", None)

    def __str__(self) -> str:
        return f"{'plain' if self.quantization == 'none' else self.quantization}, {self.dtype or 'dtype not recorded'}"


@dataclass(frozen=True, slots=True)
class Limit:
    """The maximum of each number (of top-1 agreement: the minimum)."""

    kl: float  # mean over the positions, nats
    logprob: float  # largest difference of a log-probability
    top1: float  # share of positions with the same most probable token
    effect: float | None  # relative error of the adapter's effect; None if the others are stricter. B = 0 has 1


class Row(NamedTuple):
    measured: Limit
    allowed: Limit


TABLE: dict[str, Row] = {
    "float32": Row(Limit(2.2e-10, 2.6e-5, 1.00, None), Limit(1e-6, 1e-3, 0.95, None)),
    "float16": Row(Limit(8.4e-6, 5.7e-2, 0.97, None), Limit(3e-5, 0.2, 0.90, None)),
    "bfloat16": Row(Limit(6.9e-4, 0.52, 0.93, None), Limit(2e-3, 1.6, 0.80, None)),
    "16 bits on a quantized base": Row(Limit(2.1e-2, 1.6, 0.82, None), Limit(0.07, 5.0, 0.60, None)),
    "affine8 / none": Row(Limit(8.0e-3, 1.7, 0.88, 0.18), Limit(0.025, 5.0, 0.75, 0.50)),
    "affine4 / none": Row(Limit(0.19, 4.1, 0.53, 0.52), Limit(0.57, 13.0, 0.30, 0.75)),
    "nf4 / none": Row(Limit(0.18, 6.7, 0.50, 0.53), Limit(0.55, 20.0, 0.30, 0.75)),
    "affine4 / affine8": Row(Limit(0.17, 4.2, 0.53, 0.55), Limit(0.55, 13.0, 0.30, 0.75)),
    "affine8 / nf4": Row(Limit(0.20, 6.7, 0.50, 0.54), Limit(0.60, 20.0, 0.30, 0.75)),
    "int8 / none": Row(Limit(7.1e-4, 0.27, 0.97, 0.021), Limit(0.025, 5.0, 0.75, 0.50)),
    "affine4 / int8": Row(Limit(0.19, 3.2, 0.62, 0.34), Limit(0.55, 13.0, 0.30, 0.75)),
    "int8 / nf4": Row(Limit(0.15, 4.6, 0.62, 0.34), Limit(0.60, 20.0, 0.30, 0.75)),
    "affine4 / nf4": Row(Limit(0.37, 8.5, 0.40, 0.71), Limit(1.10, 25.0, 0.20, 0.90)),
}


def limit_for(pair: str) -> Limit | None:
    """Return the limit for a pair of precisions; None for a pair that was not measured."""
    return TABLE[pair].allowed if pair in TABLE else None


def with_control(limit: Limit, base_kl: float) -> Limit:
    """Return the limit for the adapter if the base without it differs by `base_kl` from its record."""
    return replace(limit, kl=min(limit.kl, max(CONTROL * base_kl, MIN_SHARE * limit.kl)))


def pair_of(recorded: Precision, here: Precision) -> str:
    """Return the row of TABLE for two precisions.

    If both have the same quantization, and so the same base, the coarser dtype decides. Otherwise only the
    quantizations do: their gap is far wider than that of any dtype. An unrecorded dtype counts as the coarsest.
    """
    if recorded.quantization != here.quantization:
        return " / ".join(sorted((recorded.quantization, here.quantization)))
    dtypes = {recorded.dtype, here.dtype}
    if recorded.quantization != "none" and (recorded.is_16_bit or here.is_16_bit):
        return "16 bits on a quantized base"
    return "bfloat16" if dtypes & {None, "bfloat16"} else "float16" if "float16" in dtypes else "float32"


# ----------------------------------------------------------------------------------------------------------------------
# What a difference means.

Kind = Literal["same", "precision-gap", "wrong-base", "broken-adapter", "nothing-recorded"]
NO_EFFECT, OTHER_EFFECT = 0.1, 0.25  # limits for the hints at a cause: of the size, and of its distance from 1


@dataclass(frozen=True, slots=True)
class Function:
    """The recomputed numbers, and their limits."""

    recorded: Precision
    here: Precision
    pair: str  # the row of TABLE
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


def within(gap: Gap, limit: Limit) -> bool:
    return gap.kl <= limit.kl and gap.logprob <= limit.logprob and gap.top1 >= limit.top1


def effect_is_within(effect: Effect | None, limit: Limit) -> bool:
    return limit.effect is None or effect is None or effect.error <= limit.effect


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
    reasons = ["the base computes the recorded values, but the adapter does not"]
    if function.effect is not None:
        size = function.effect.size
        reasons.append(f"its effect is {size:.2f} times the recorded one, with an error of {function.effect.error:.0%}")
        if abs(size) < NO_EFFECT:
            reasons.append("it does nothing: B is zero, or its tensors are not applied")
        elif abs(size - 1) > OTHER_EFFECT:
            reasons.append("check alpha / rank (mlx-lm: scale)")
    if fit.missing:
        reasons.append(f"{len(fit.missing)} modules that its config targets have no tensors, such as {fit.missing[0]}")
    return f"{'; '.join(reasons)}. Copy it again from the machine of the training, without converting it"


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
