"""The memory planner: whether a run fits, and the cheapest settings with which it does.

It decides every `auto` of the section `memory`, and what the commands suggest where a run does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dualtune.base.text import in_bytes
from dualtune.engine.card import KEEP_ALL, LAYERS, NUMBER, ActivationCheckpointing, card_of
from dualtune.engine.machine import Budget
from dualtune.engine.memory.counted import Shape
from dualtune.engine.memory.estimate import (
    AUTO_MICRO_BATCH_TOKENS,
    FULL_CHECKPOINTING,
    Ask,
    Estimate,
    MemoryPart,
    ask_of,
    estimate,
    last_that_fits,
    longest_that_fits,
    num_trained,
)
from dualtune.model.optimizer import IN_EIGHT_BITS

if TYPE_CHECKING:
    from dualtune.config import Config

GRANULE = 64  # tokens; suggestions are multiples of it
ROOM = 0.9  # of the memory, that `auto` uses: an estimate cannot know everything
ADAPTER_INPUTS_TIME = (
    1.06  # of a step with memory.checkpointing: adapter_inputs; 0.99 on a CPU in benchmarks/checkpointing.py
)
RESIDENT, OFFLOAD = "memory.resident_layers", "memory.offload"
CHECKPOINTING, TOKENS, LENGTH = "memory.checkpointing", "train.micro_batch_tokens", "data.max_length"
OPTIMIZER = "train.optimizer"
SAME, CUT = "same result", "longer documents are cut"


@dataclass(frozen=True, slots=True)
class Saving:
    """A change of the settings that saves memory."""

    settings: Mapping[str, str | int]
    saved_bytes: int
    time: float | None  # how many times as long a step takes for it; None: not known
    remark: str  # what it does to the result

    def as_json(self) -> dict[str, Any]:
        return {
            "set": [f"{key}={value}" for key, value in self.settings.items()], "saved_bytes": self.saved_bytes,
            "time": self.time, "remark": self.remark,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Smaller:
    """Settings with which a run fits; empty if there are none."""

    settings: Mapping[str, str | int]
    remark: str

    def __str__(self) -> str:
        return " ".join([*set_options(self.settings), self.remark])


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run needs, with every `auto` resolved, and the changes with which it fits."""

    decoder: Shape
    ask: Ask
    estimate: Estimate
    budget: Budget
    savings: tuple[Saving, ...]  # one after another; empty if it fits as it is, or if nothing helps

    @property
    def fits(self) -> bool:
        has_room = _has_room(self.decoder, self.ask, self.budget.host_bytes)
        return has_room and self.estimate.total_bytes <= self.budget.bytes

    @property
    def time(self) -> float:
        """How many times as long a step takes as without recomputation."""
        return recompute_time(self.decoder, self.ask)

    @property
    def flops_per_token(self) -> float:
        return flops_per_token(self.decoder, self.ask)

    def compare(self) -> str:
        """Say what the run needs and has, and where the memory that it has comes from."""
        recomputed = f" ({self.recomputed})" if self.recomputed else ""
        need, has = in_bytes(self.estimate.total_bytes), in_bytes(self.budget.bytes)
        text = f"needs {need}{recomputed}, has {has} ({self.budget.reason})"
        waiting, host_bytes = _waiting(self.decoder, self.ask), self.budget.host_bytes
        if host_bytes is None or not waiting:
            return text
        return f"{text}; layers that wait need {in_bytes(waiting)} of host memory, which has {in_bytes(host_bytes)}"

    @property
    def recomputed(self) -> str:
        """What the backward pass recomputes; empty if nothing."""
        value = self.ask.checkpointing
        return "" if value == KEEP_ALL else value.describe(self.decoder.layers)

    @property
    def smaller(self) -> Smaller:
        """The settings of all changes together."""
        if not self.savings:
            return Smaller({}, "Not even the shortest documents fit: use a smaller model or a larger machine")
        settings = {key: value for saving in self.savings for key, value in saving.settings.items()}
        effects = [saving.remark for saving in self.savings if saving.remark != SAME]
        return Smaller(settings, "; ".join(["fits", *effects]) if effects else "fits, and the result stays the same")


def set_options(settings: Mapping[str, str | int]) -> list[str]:
    """Return settings as options of a command line, quoted for a shell."""
    pairs = (f"{key}={value}" for key, value in settings.items())
    return [f"--set '{pair}'" if " " in pair else f"--set {pair}" for pair in pairs]


def plan_of(
    config: Config, decoder: Shape, backend: str, device: str, has: Budget, evaluated: Config | None = None,
    teacher: MemoryPart | None = None, packages: frozenset[str] | None = None,
) -> MemoryPlan:  # fmt: skip
    """Plan the run of a config. ConfigError as for `ask_of`, or if the model has fewer layers than it recomputes.

    `evaluated`: the config with the micro-batches of the evaluation, which may be larger than those of the steps, but
    keep nothing for a backward pass. The plan is that of whichever needs more. `teacher`: the weights of another model
    that is loaded beside. `packages`: those of the machine, if it is not this one.
    """
    ask = replace(ask_of(config, decoder, backend, device), teacher=teacher, packages=packages)
    ask.checkpointing.num_recomputed(decoder.layers)
    plan = make_plan(decoder, ask, has, auto=config.memory.checkpointing == "auto")
    if evaluated is not None:
        larger = ask_of(evaluated, decoder, backend, device)
        # What full recomputation needs besides the inputs of layers: the reserve grows with the activations too.
        larger = replace(
            plan.ask,
            micro_batch_tokens=larger.micro_batch_tokens,
            max_length=larger.max_length,
            checkpointing=FULL_CHECKPOINTING,
        )
        parts = estimate(decoder, larger).parts
        if sum(part.bytes for part in parts if part.name != "activations") > plan.estimate.total_bytes:
            return plan_of(evaluated, decoder, backend, device, has, teacher=teacher, packages=packages)
    return plan


def make_plan(decoder: Shape, ask: Ask, has: Budget, *, auto: bool) -> MemoryPlan:
    """Plan a run within a number of bytes. `auto`: memory.checkpointing is the planner's choice."""
    if auto and ask.checkpointing == KEEP_ALL:
        ask = replace(ask, checkpointing=choose_checkpointing(decoder, ask, has.bytes))
    plan = MemoryPlan(decoder, ask, estimate(decoder, ask), has, ())
    return plan if plan.fits else replace(plan, savings=_cheapest_savings(decoder, ask, has))


def savings_alone(decoder: Shape, ask: Ask) -> list[Saving]:
    """Return the changes that save memory, each taken alone, in the planner's order.

    For a run that has run out of memory: how much is missing is not known, because the plan was too low or there is
    less memory than it was made for.
    """
    half = ask.max_length // 2
    tail = [_Stage(replace(ask, max_length=half, micro_batch_tokens=half), {LENGTH: half}, None, CUT)] if half else []
    recomputing = sorted(_recomputing(decoder, ask), key=lambda stage: _needs(decoder, stage.ask))[:1]
    stages = [*recomputing, *_fewer_tokens(decoder, ask, ask.max_length, 0), *_four_bit(ask), *tail]
    savings = (saving for stage in stages for saving in _as_savings(decoder, ask, [stage]))
    return [saving for saving in savings if saving.saved_bytes > 0]


def choose_checkpointing(decoder: Shape, ask: Ask, have_bytes: int) -> ActivationCheckpointing:
    """Return what `memory.checkpointing: auto` means: the cheapest value with which the run fits easily, and why.

    If none fits, everything is recomputed that can be: the estimate may be too high.
    """
    whole, room = estimate(decoder, ask).total_bytes, int(ROOM * have_bytes)
    have = f"{in_bytes(have_bytes)} are available"
    if whole <= room:
        return replace(KEEP_ALL, reason=f"auto: everything fits, {have}")
    values = _dial(decoder, ask)
    if not values:
        return replace(KEEP_ALL, reason=f"auto: {ask.backend} recomputes nothing")
    fits = (value for value in values if _needs(decoder, replace(ask, checkpointing=value)) <= room)
    chosen = next(fits, values[-1])
    return replace(chosen, reason=f"auto: to keep everything takes {in_bytes(whole)}, {have}")


def recompute_time(decoder: Shape, ask: Ask) -> float:
    """Return how many times as long a step takes with the checkpointing of `ask` as without, by operations."""
    if ask.checkpointing.adapter_inputs:
        return ADAPTER_INPUTS_TIME
    recomputed = 2 * _multiplications(decoder, ask) * ask.checkpointing.num_recomputed(decoder.layers)
    return 1 + recomputed / flops_per_token(decoder, ask)


def flops_per_token(decoder: Shape, ask: Ask) -> float:
    """Return the operations of a step for each token of documents of `max_length` tokens, without recomputation.

    Counted as in `dualtune.doctor.bench.measure`, which has the sources: 2 for a multiplication and its addition, the
    forward pass twice for the backward pass's gradients of inputs, attention 2.5 times, the adapter's gradients once
    more.
    """
    layers, scores = decoder.layers, decoder.width * ask.max_length
    forward = _multiplications(decoder, ask) * layers + decoder.vocab * decoder.hidden
    if ask.trains_model:  # and the gradients of all weights
        return 2 * (3 * forward + 0.5 * scores * layers)
    return 2 * (2 * forward + 1.5 * scores * layers + 3 * num_trained(decoder, ask))


def _multiplications(decoder: Shape, ask: Ask) -> float:
    """Of a layer's forward pass, for each token: the weights, and the two products of scores with half the keys."""
    return decoder.active_parameters / max(1, decoder.layers) + decoder.width * ask.max_length


def _dial(decoder: Shape, ask: Ask) -> list[ActivationCheckpointing]:
    """Return what the backend can recompute, the cheapest in time first."""
    honoured = card_of(ask.backend).honoured.get(CHECKPOINTING, ())
    layers = range(1, decoder.layers) if LAYERS in honoured else ()
    values = [ActivationCheckpointing("all" if k == decoder.layers - 1 else k) for k in layers]
    if "adapter_inputs" in honoured and ask.kernels != "reference" and not ask.trains_model:
        values.append(ActivationCheckpointing(adapter_inputs=True))
    return sorted(values, key=lambda value: recompute_time(decoder, replace(ask, checkpointing=value)))


def _needs(decoder: Shape, ask: Ask) -> int:
    return estimate(decoder, ask).total_bytes


# --- savings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stage:
    """The setup after a change."""

    ask: Ask
    settings: Mapping[str, str | int]
    time: float | None
    remark: str


def _cheapest_savings(decoder: Shape, ask: Ask, has: Budget) -> tuple[Saving, ...]:
    """Return the first sequence of changes that fits; empty if none does."""
    for stages in _sequences(decoder, ask, has.bytes):
        last = stages[-1].ask
        if _needs(decoder, last) <= has.bytes and _has_room(decoder, last, has.host_bytes):
            return tuple(_as_savings(decoder, ask, stages))
    return ()


def _has_room(decoder: Shape, ask: Ask, host_bytes: int | None) -> bool:
    """Return whether the host has room for the layers that wait there."""
    return host_bytes is None or _waiting(decoder, ask) <= host_bytes


def _waiting(decoder: Shape, ask: Ask) -> int:
    """Return the bytes of streamed layers on the host, each in a pinned buffer, whose size is a power of two."""
    if ask.resident_layers is None:
        return 0
    one, two = (estimate(decoder, replace(ask, resident_layers=layers))["weights"] for layers in (1, 2))
    return decoder.layers * (1 << (two - one - 1).bit_length())


def _as_savings(decoder: Shape, ask: Ask, stages: list[_Stage]) -> Iterator[Saving]:
    before = _needs(decoder, ask)
    for stage in stages:
        after = _needs(decoder, stage.ask)
        yield Saving(stage.settings, before - after, stage.time, stage.remark)
        before = after


def _sequences(decoder: Shape, ask: Ask, have_bytes: int) -> Iterator[list[_Stage]]:
    """Yield sequences of changes, each kind as it is, then with fewer bits for the moments, then for the base.

    First those that cost only time, then streamed layers, which may cost a lot of it, then shorter documents.
    """
    bases = [[], *(stages for stages in (_eight_bit_moments(ask), _four_bit(ask)) if stages)]
    for ways in (_with_same_documents, _with_streamed_layers, _with_shorter_documents):
        for base in bases:
            start = base[-1].ask if base else ask
            yield from ([*base, *tail] for tail in ways(decoder, start, have_bytes) if base or tail)


def _with_same_documents(decoder: Shape, ask: Ask, have_bytes: int) -> Iterator[list[_Stage]]:
    yield []
    # Smaller products cost time only where a micro-batch has fewer tokens than `auto` gives it.
    start = _fewer_tokens(decoder, ask, max(AUTO_MICRO_BATCH_TOKENS, ask.max_length), have_bytes)
    yield start
    recomputed = _recomputing(decoder, start[-1].ask if start else ask)
    yield from ([*start, stage] for stage in recomputed)
    strongest = [*start, *recomputed[-1:]]
    strongest += _fewer_tokens(decoder, strongest[-1].ask if strongest else ask, ask.max_length, have_bytes)
    yield strongest
    yield [*strongest, *_offloading(strongest[-1].ask if strongest else ask)]


def _with_streamed_layers(decoder: Shape, ask: Ask, have_bytes: int) -> Iterator[list[_Stage]]:
    """Yield the strongest of the other changes with the most layers that then fit on the device."""
    if ask.trains_model or NUMBER not in card_of(ask.backend).honoured.get(RESIDENT, ()):
        return
    *_, start = _with_same_documents(decoder, ask, have_bytes)
    before = start[-1].ask if start else ask
    recomputing = replace(before, checkpointing=replace(FULL_CHECKPOINTING, offload=before.checkpointing.offload))

    def fits(layers: int) -> bool:
        return _needs(decoder, replace(recomputing, resident_layers=layers)) <= have_bytes

    if fits(1):
        layers = last_that_fits(fits, 1, ask.resident_layers or decoder.layers)
        settings = {RESIDENT: layers} if recomputing == before else {RESIDENT: layers, CHECKPOINTING: "full"}
        yield [*start, _Stage(replace(recomputing, resident_layers=layers), settings, None, SAME)]


def _with_shorter_documents(decoder: Shape, ask: Ask, have_bytes: int) -> Iterator[list[_Stage]]:
    strongest = _recomputing(decoder, ask)[-1:]
    before = strongest[-1].ask if strongest else ask
    if length := longest_that_fits(decoder, before, have_bytes) // GRANULE * GRANULE:
        cut = replace(before, max_length=length, micro_batch_tokens=length)
        yield [*strongest, _Stage(cut, {LENGTH: length, TOKENS: length}, None, CUT)]


def _recomputing(decoder: Shape, ask: Ask) -> list[_Stage]:
    """Return the setups that recompute more than `ask`, the cheapest first."""
    now, offload = recompute_time(decoder, ask), ask.checkpointing.offload
    values = [replace(value, offload=offload) for value in _dial(decoder, ask) if value.layers or not offload]
    setups = [(value, replace(ask, checkpointing=value)) for value in values]
    timed = [(value, setup, recompute_time(decoder, setup)) for value, setup in setups]
    return [
        _Stage(setup, {CHECKPOINTING: _written(value)}, time / now, SAME) for value, setup, time in timed if time > now
    ]


def _offloading(ask: Ask) -> list[_Stage]:
    """Return the setup in which the inputs of recomputed layers wait in host memory, if the device has another one."""
    honoured = card_of(ask.backend).capabilities(ask.device).get(OFFLOAD, ())
    if "activations" not in honoured or ask.checkpointing.offload or not ask.checkpointing.layers:
        return []
    moved = replace(ask, checkpointing=replace(ask.checkpointing, offload=True))
    return [_Stage(moved, {OFFLOAD: "activations"}, None, SAME)]


def _written(value: ActivationCheckpointing) -> str:
    """Return the value of memory.checkpointing in a config."""
    if value.adapter_inputs:
        return "adapter_inputs"
    return "full" if value.layers == "all" else f"{{layers: {value.layers}}}"


def _fewer_tokens(decoder: Shape, ask: Ask, least: int, have_bytes: int) -> list[_Stage]:
    """Return the largest smaller micro-batch that fits, or the one with `least` tokens if none does."""
    if ask.micro_batch_tokens <= least:
        return []

    def fits(tokens: int) -> bool:
        return _needs(decoder, replace(ask, micro_batch_tokens=tokens)) <= have_bytes

    tokens = last_that_fits(fits, least, ask.micro_batch_tokens, GRANULE) if fits(least) else least
    tokens = max(tokens // GRANULE * GRANULE, least)
    return [_Stage(replace(ask, micro_batch_tokens=tokens), {TOKENS: tokens}, 1.0, SAME)]


def _eight_bit_moments(ask: Ask) -> list[_Stage]:
    """Return the setup with the optimizer's moments in 8 bits, if the backend has them."""
    coded = IN_EIGHT_BITS.get(ask.optimizer)
    if coded is None or coded not in card_of(ask.backend).honoured.get(OPTIMIZER, ()):
        return []
    return [
        _Stage(replace(ask, optimizer=coded), {OPTIMIZER: coded}, None, "the optimizer's moments are rounded to 8 bits")
    ]


def _four_bit(ask: Ask) -> list[_Stage]:
    """Return the setup with a base in 4 bits, if the device has one, and the base is frozen and not quantized."""
    device = card_of(ask.backend).device(ask.device)
    if ask.trains_model or ask.quantization != "none" or device is None or device.four_bit is None:
        return []
    packed = replace(ask, quantization=device.four_bit)
    return [_Stage(packed, {"model.quantization": device.four_bit}, None, "the base is rounded to 4 bits")]
