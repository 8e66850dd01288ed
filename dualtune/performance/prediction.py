"""The time of a step: each piece against the limits of a machine. A roofline (Williams et al., CACM 52(4), 2009).

A piece takes as long as its operations or its bytes, whichever take longer. The device does one piece after another,
while the host calls operators and the bus moves layers: the step takes as long as the slowest of the three, and the
waits. A CPU is host and device in one, so its times add up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dualtune.card import card_of
from dualtune.errors import EnvironmentFault
from dualtune.memory.ask import Ask
from dualtune.memory.counted import Counted, Shape
from dualtune.memory.plan import flops_per_token
from dualtune.performance.documents import StepDocuments
from dualtune.performance.work import ATTENTION, PARTS, Piece, pieces_of
from dualtune.platform.rates import MachineLimits
from dualtune.text.show import in_short_time, in_time

COMPUTE, MEMORY, LAUNCH, TRANSFER = "compute", "memory", "launch", "transfer"
SAID = "computed from published limits and stated efficiencies, not measured"


@dataclass(frozen=True, slots=True)
class PartTime:
    """A part of a step, and what bounds it."""

    name: str
    flops: float
    bytes: float  # read and written; of transfers: moved
    launches: float
    seconds: float  # of the device, the bus, or the host if it needs longer
    bound: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """The predicted time of an optimizer step."""

    parts: tuple[PartTime, ...]
    tokens: int  # of the step's documents, without padding
    documents: str  # where their lengths come from
    device_s: float
    host_s: float  # the calls of operators; on a CPU part of `device_s`
    transfer_s: float
    waits: int
    waits_s: float
    model_flops: float  # by the formula of dualtune.bench.flops
    peak_flops: float  # of the machine, in the compute dtype

    @property
    def step_s(self) -> float:
        return max(self.device_s, self.host_s, self.transfer_s) + self.waits_s

    @property
    def bound(self) -> str:
        """What the whole step is bound by."""
        if self.transfer_s > max(self.device_s, self.host_s):
            return TRANSFER
        if self.host_s > self.device_s:
            return LAUNCH
        seconds = {bound: sum(p.seconds for p in self.parts if p.bound == bound) for bound in (COMPUTE, MEMORY, LAUNCH)}
        return max(seconds, key=lambda bound: seconds[bound])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def utilisation(self) -> float:
        """Model FLOP utilisation: of what the machine's data sheet says, or what its products were measured at."""
        return self.model_flops / self.step_s / self.peak_flops

    def describe(self) -> str:
        """Say how long a step takes, and that this is no measurement."""
        return (
            f"about {self.tokens_per_s:,.0f} tokens/s, {in_short_time(self.step_s)} for a step of "
            f"{self.tokens:,} tokens, bound by {self.bound}; {SAID}"
        )

    def of_run(self, num_steps: int | None) -> str:
        """Say how long so many steps take, without evaluations and saves."""
        if num_steps is None:
            return "the number of steps is not known"
        return f"{num_steps:,} step{'s' * (num_steps != 1)} take about {in_time(num_steps * self.step_s)}"

    def as_json(self) -> dict[str, Any]:
        own = asdict(self)
        derived = ("step_s", "tokens_per_s", "utilisation", "bound")
        return {"what": SAID, **{name: getattr(self, name) for name in derived}, **own}


def predict(decoder: Shape, ask: Ask, documents: StepDocuments, limits: MachineLimits) -> StepTime:
    """Predict a step. EnvironmentFault if the backend does not say what its step takes, or for the plain kernels."""
    costs = card_of(ask.backend).costs.get(ask.device)
    if costs is None:
        raise EnvironmentFault(f"the backend '{ask.backend}' does not say what its step takes on {ask.device}")
    if isinstance(decoder, Counted):
        raise EnvironmentFault(
            f"no time is predicted for {decoder.model_class}, whose shapes are counted: dualtune bench measures a step"
        )
    if ask.kernels == "reference":
        raise EnvironmentFault("no time is predicted for model.kernels=reference; set it to auto")
    if ask.kernels == "auto" and decoder.num_parameters < costs.least_parameters:
        raise EnvironmentFault(
            f"no time is predicted for a model of {decoder.num_parameters:,} parameters: the backend '{ask.backend}' "
            f"compiles nothing below {costs.least_parameters:,}"
        )
    if ask.dtype not in limits.product_flops:
        known = ", ".join(limits.product_flops)
        raise EnvironmentFault(f"no limit is known for products in {ask.dtype}; known: {known}")
    pieces = pieces_of(decoder, ask, costs, documents)
    parts = [_part(name, [piece for piece in pieces if piece.part == name], ask.dtype, limits) for name in PARTS]
    launches, waits = sum(piece.launches for piece in pieces), costs.waits * len(documents.rows)
    peak_flops = limits.product_flops[ask.dtype]
    device_s = sum(_seconds(piece, ask.dtype, limits)[0] for piece in pieces)
    host_s = launches * limits.launch_s
    transfer_s = sum(_moved_s(piece, limits) for piece in pieces)
    if not limits.is_asynchronous:
        device_s += host_s
    return StepTime(
        tuple(part for part in parts if part is not None), documents.tokens, documents.source, device_s, host_s,
        transfer_s, waits, waits * limits.wait_s, _model_flops(decoder, ask, documents), peak_flops,
    )  # fmt: skip


def _part(name: str, pieces: list[Piece], dtype: str, limits: MachineLimits) -> PartTime | None:
    """Return the time of a part; None if the step has none of it."""
    if not pieces:
        return None
    timed = [_seconds(piece, dtype, limits) for piece in pieces]
    launches = sum(piece.launches for piece in pieces)
    bounds = {bound: sum(s for s, of in timed if of == bound) for bound in (COMPUTE, MEMORY)}
    device_s, host_s = sum(bounds.values()), launches * limits.launch_s
    moved_s = sum(_moved_s(piece, limits) for piece in pieces)
    bounds |= {LAUNCH: host_s if host_s > device_s or not limits.is_asynchronous else 0.0, TRANSFER: moved_s}
    seconds = max(device_s, host_s, moved_s) if limits.is_asynchronous else device_s + host_s
    return PartTime(
        name, sum(piece.products + piece.elementwise for piece in pieces),
        sum(piece.bytes + piece.moved_bytes for piece in pieces), launches, seconds,
        max(bounds, key=lambda bound: bounds[bound]),
    )  # fmt: skip


def _seconds(piece: Piece, dtype: str, limits: MachineLimits) -> tuple[float, str]:
    """Return the time that the device needs for a piece, and whether its operations or its bytes take it."""
    share = limits.attention_share if piece.part == ATTENTION else limits.product_share
    rate = limits.product_flops[dtype] * share * _side_share(piece.side, limits.side_shares)
    compute_s = piece.products / rate + piece.elementwise / limits.elementwise_flops
    bytes_, bandwidth = piece.bytes, limits.bytes_per_s
    if limits.link_bytes_per_s is None:  # what would be moved is copied in the same memory
        bytes_ += 2 * piece.moved_bytes
    if limits.cached and bytes_ <= limits.cached[0] * max(1.0, piece.launches):
        bandwidth = limits.cached[1]
    memory_s = bytes_ / (bandwidth * limits.memory_share)
    return (compute_s, COMPUTE) if compute_s >= memory_s else (memory_s, MEMORY)


def _moved_s(piece: Piece, limits: MachineLimits) -> float:
    link = limits.link_bytes_per_s
    return 0.0 if link is None else piece.moved_bytes / (link * limits.memory_share)


def _side_share(side: float, shares: Mapping[int, float]) -> float:
    """Interpolate the share that a product with this shortest side reaches; 1 beyond the longest that is known."""
    sides = sorted(shares)
    if not sides or side >= sides[-1] or side == 0:
        return 1.0
    above = bisect_left(sides, side)
    if above == 0:
        return shares[sides[0]]
    low, high = sides[above - 1], sides[above]
    along = (side - low) / (high - low)
    return (1 - along) * shares[low] + along * shares[high]


def _model_flops(decoder: Shape, ask: Ask, documents: StepDocuments) -> float:
    """Operations that the model requires, without recomputation. A token sees half of a document of `length`."""
    length = 2 * documents.seen / documents.tokens - 1
    return documents.tokens * flops_per_token(decoder, replace(ask, max_length=round(length)))
