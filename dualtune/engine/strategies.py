"""The strategies to save memory that the source documents name: what each saves and costs, by formula, or why not.

Bytes are those of `estimate`, times those of `predict` with a link of this rate in place of the machine's. All are
compared with a run in which every technique is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dualtune.base.errors import EnvironmentFault
from dualtune.engine.card import KEEP_ALL, NUMBER, card_of
from dualtune.engine.machines import MachineLimits
from dualtune.engine.memory.counted import Shape
from dualtune.engine.memory.estimate import (
    FULL_CHECKPOINTING,
    Ask,
    estimate,
    state_bytes,
)
from dualtune.engine.step_time import StepDocuments, predict
from dualtune.model.optimizer import IN_EIGHT_BITS, RuleName

LINKS = (12e9, 24e9)  # bytes per second in one direction between host and device, as the documents have them
STEP, SEARCH = "a step", "a search for a prediction"


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy by its name in the documents."""

    name: str
    settings: Mapping[str, str | int]  # here; empty: not offered, or nothing to set
    saved_bytes: int | None  # of the device's memory at the peak; None: not offered
    added_s: tuple[float, ...] | None  # at each of LINKS; None: not offered, or no time is predicted
    during: str  # what takes that much longer, and where the bytes are saved
    remark: str  # of what is not offered: why

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def strategies(
    decoder: Shape, ask: Ask, documents: StepDocuments | None, limits: MachineLimits | None
) -> list[Strategy]:
    """Return the strategies for a run. Without documents or limits, no step is predicted: only copies have a time."""
    plain = replace(ask, checkpointing=KEEP_ALL, resident_layers=None, optimizer=_unpacked(ask))
    run = _Run(decoder, plain, documents, limits)
    alone = [*_of_the_optimizer(run), *_of_the_activations(run)]
    return [*alone, *_presets(run, alone)]


def _unpacked(ask: Ask) -> RuleName:
    return next((plain for plain, coded in IN_EIGHT_BITS.items() if coded == ask.optimizer), ask.optimizer)


@dataclass(frozen=True, slots=True)
class _Run:
    """What strategies are compared with: the run in which each is off."""

    decoder: Shape
    ask: Ask
    documents: StepDocuments | None
    limits: MachineLimits | None

    def step(self, name: str, settings: Mapping[str, str | int], ask: Ask, remark: str) -> Strategy:
        """Return a strategy that changes every step; not offered if the device does not honour a setting."""
        honoured = card_of(ask.backend).capabilities(ask.device)
        for key, value in settings.items():
            allowed = honoured.get(key, frozenset({"none", "all", "adamw"}))
            if value not in allowed and (NUMBER not in allowed or not isinstance(value, int)):
                return _not_offered(name, f"not by {ask.backend} on {ask.device}: {key}={value}")
        saved = estimate(self.decoder, self.ask).total_bytes - estimate(self.decoder, ask).total_bytes
        before, after = self.seconds(self.ask), self.seconds(ask)
        added = None
        if before is not None and after is not None:
            added = tuple(b - a for a, b in zip(before, after, strict=True))
        return Strategy(name, settings, saved, added, STEP, remark)

    def seconds(self, ask: Ask) -> tuple[float, ...] | None:
        """Return the time of a step at each of LINKS."""
        if self.documents is None or self.limits is None:
            return None
        try:
            return tuple(
                predict(self.decoder, ask, self.documents, _linked(self.limits, link)).step_s for link in LINKS
            )
        except EnvironmentFault:  # a model whose step is not predicted
            return None


def _linked(limits: MachineLimits, bytes_per_s: float) -> MachineLimits:
    """Return the limits with this rate of the link, as it is reached; without one, nothing is moved."""
    if limits.link_bytes_per_s is None:
        return limits
    return replace(limits, link_bytes_per_s=bytes_per_s / limits.memory_share)


def _not_offered(name: str, why: str) -> Strategy:
    return Strategy(name, {}, None, None, "", why)


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer's state, which the forward passes of a search do not need.


def _of_the_optimizer(run: _Run) -> Iterator[Strategy]:
    yield Strategy("none", {"hybrid.offload": "none"}, 0, (0.0, 0.0), SEARCH, "the optimizer's state stays")
    yield _not_offered(
        "cpu_offload", "memory that is not pinned is copied through a pinned buffer; pinned_cpu_offload saves the same"
    )
    if "optimizer" in card_of(run.ask.backend).capabilities(run.ask.device).get("hybrid.offload", ()):
        remark = "the peak of the run stays that of a full step; the copy back overlaps with the next gradient"
        state, seconds = state_bytes(run.decoder, run.ask), run.seconds(run.ask) or (0.0, 0.0)
        added = tuple(moving_s(state, link, step_s) for link, step_s in zip(LINKS, seconds, strict=True))
        yield Strategy("pinned_cpu_offload", {"hybrid.offload": "optimizer"}, state, added, SEARCH, remark)
    else:
        yield _not_offered("pinned_cpu_offload", f"{run.ask.device} has no memory apart from the host's")
    if coded := IN_EIGHT_BITS.get(run.ask.optimizer):
        eight_bit = replace(run.ask, optimizer=coded)
        remark = "the nearest: the moments are rounded to 8 bits for the whole run, not packed for each search"
        yield run.step("compress_in_place", {"train.optimizer": coded}, eight_bit, remark)
    else:
        yield _not_offered("compress_in_place", f"{run.ask.optimizer} has no form in 8 bits")
    yield _not_offered(
        "drop_and_reinitialize",
        "moments that begin again at zero make the next steps those of a warm-up, and convergence suffers; the "
        "nearest: train.optimizer=sgd, which has no state",
    )
    yield _not_offered(
        "async_restore, lookahead",
        "the length of a search is not known ahead; the copy back begins at its end, and overlaps with the next "
        "gradient, which needs no moments",
    )


def search_share(decoder: Shape, ask: Ask) -> float:
    """Return the peak of a search, which keeps nothing for a backward pass, as a share of the peak of a step."""
    parts = estimate(decoder, replace(ask, checkpointing=FULL_CHECKPOINTING)).parts
    peak = sum(part.bytes for part in parts if part.name != "activations")
    return peak / estimate(decoder, ask).total_bytes


def moving_s(num_bytes: int, link: float, step_s: float) -> float:
    """Return the seconds that a search waits for copies: the way out, and what the way back exceeds a step by."""
    one_way = num_bytes / link
    return one_way + max(0.0, one_way - step_s)


# ----------------------------------------------------------------------------------------------------------------------
# What a forward pass keeps for the backward pass, and the base. A search keeps nothing, whatever is chosen here.


def _of_the_activations(run: _Run) -> Iterator[Strategy]:
    ask = run.ask
    recomputed = replace(ask, checkpointing=FULL_CHECKPOINTING)
    remark = "all layers but the last are recomputed; {layers: n} recomputes fewer, auto as few as fit"
    yield run.step("discard_activations", {"memory.checkpointing": "full"}, recomputed, remark)
    yield run.step(
        "activations on the host", {"memory.checkpointing": "full", "memory.offload": "activations"},
        replace(ask, checkpointing=replace(FULL_CHECKPOINTING, offload=True)), "the inputs of recomputed layers too",
    )  # fmt: skip
    if ask.trains_model:
        yield _not_offered("streamed layers", "every layer is trained, so none can wait unchanged on the host")
        return
    yield run.step(
        "streamed layers", {"memory.checkpointing": "full", "memory.resident_layers": 2},
        replace(recomputed, resident_layers=2), "two layers of the base are on the device, the others on their way",
    )  # fmt: skip


def _presets(run: _Run, alone: Sequence[Strategy]) -> Iterator[Strategy]:
    """Yield the presets. Between the ends the planner chooses, because what is needed depends on model and machine."""
    yield Strategy("preset disabled", {"memory.checkpointing": "none"}, 0, (0.0, 0.0), STEP, "all of these are off")
    yield _not_offered(
        "preset conservative, aggressive", "memory.checkpointing=auto recomputes as little as fits, and dualtune plan "
        "lists what else is needed",
    )  # fmt: skip
    settings = {key: value for one in alone if one.during == STEP for key, value in one.settings.items()}
    checkpointing = FULL_CHECKPOINTING if "memory.checkpointing" in settings else KEEP_ALL
    everything = replace(
        run.ask, checkpointing=replace(checkpointing, offload=settings.get("memory.offload") == "activations"),
        resident_layers=2 if "memory.resident_layers" in settings else None,
        optimizer=settings.get("train.optimizer", run.ask.optimizer),
    )  # fmt: skip
    yield run.step("preset maximum", settings, everything, "all of those above that change a step")
