"""The time of a step: each piece against the limits of a machine. A roofline (Williams et al., CACM 52(4), 2009).

A piece takes as long as its operations or its bytes, whichever take longer. The device does one piece after another,
while the host calls operators and the bus moves layers: the step takes as long as the slowest of the three, and the
waits. A CPU is host and device in one, so its times add up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from dualtune.base.errors import EnvironmentFault
from dualtune.base.text import in_short_time, in_time
from dualtune.engine.card import StepCosts, card_of
from dualtune.engine.documents import alike
from dualtune.engine.machines import MachineLimits
from dualtune.engine.memory.counted import Counted, Shape
from dualtune.engine.memory.estimate import (
    AFFINE_BITS,
    AFFINE_GROUP,
    MASTER_BYTES,
    Adapted,
    Ask,
    adapted_by,
    has_plain_loss,
    mean_rank,
    num_trained,
    padded,
    state_bytes,
    tensors_of,
)
from dualtune.engine.memory.plan import flops_per_token
from dualtune.engine.memory.shapes import Decoder, Linear
from dualtune.model.optimizer import OPTIMIZERS, is_matrix


@dataclass(frozen=True)
class StepDocuments:
    """The documents of one optimizer step, in micro-batches of rows."""

    lengths: np.ndarray  # tokens, int [documents]
    rows: tuple[tuple[tuple[int, ...], ...], ...]  # micro-batch -> row -> lengths of its documents in tokens
    target_share: float  # how many of the tokens are targets
    source: str  # where the lengths come from
    # Tokens at the beginning of each document that are computed with another one, int [documents]; None: of none. Rows
    # have what is computed.
    shared: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Tokens of documents, without padding; those that documents share count for each."""
        return int(self.lengths.sum())

    @cached_property
    def computed(self) -> np.ndarray:
        """The tokens of each document that are computed for it, int [documents]."""
        return self.lengths if self.shared is None else self.lengths - self.shared

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The padded length of the rows of each micro-batch, in tokens."""
        return tuple(padded(max(map(sum, group))) for group in self.rows)

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """The tokens that each micro-batch computes, padding included."""
        return tuple(len(group) * width for group, width in zip(self.rows, self.widths, strict=True))

    @property
    def targets(self) -> tuple[int, ...]:
        """The targets of each micro-batch: the first token of a document is none."""
        share = self.target_share * float((self.lengths - 1).sum() / max(1, (self.computed - 1).sum()))
        return tuple(round(share * sum(length - 1 for row in group for length in row)) for group in self.rows)

    @property
    def seen(self) -> int:
        """The number of pairs of a token and one that it sees, itself included."""
        pairs = self.lengths * (self.lengths + 1) // 2
        return int((pairs if self.shared is None else pairs - self.shared * (self.shared + 1) // 2).sum())


# ----------------------------------------------------------------------------------------------------------------------
# What a training step computes, reads and writes, part by part: by formula from the model's shape, and by the card.
#
# The products follow from the shape: forward 2 operations for each weight and token, backward as many for the gradient
# of the input, and of the weight only for what is trained. A product reads its operands and writes its result once.
# What a backend's kernels do between the products (numbers read and written, elementwise operations, operator calls)
# stands in its card as `StepCosts`: so many for each of a unit, forward and backward. `units` counts the units of a
# step.
#
# Legend: T tokens of a micro-batch with padding, r rank, c bytes of a number in the compute dtype.

BASE, LORA, ATTENTION, NORMS = "base products", "LoRA products", "attention", "norms and residuals"
ROTARY, ACTIVATION, DROPOUT, UNPACKING, SCALING = "rotary", "activation", "dropout", "unpacking", "scaled outputs"
HEAD, OPTIMIZER, REST = "head and loss", "optimizer", "rest"
RECOMPUTATION, TRANSFERS = "recomputation", "transfers"
ANSWERS = "answers"  # the forward pass before a step that compares answers
TEACHER = "teacher"  # the forward pass of one that answers while the run trains
IN_LAYERS = (BASE, LORA, ATTENTION, NORMS, ROTARY, ACTIVATION, DROPOUT, UNPACKING, SCALING)
RECOMPUTED_INPUTS = (NORMS, DROPOUT)  # what memory.checkpointing: adapter_inputs computes again
PARTS = (*IN_LAYERS, HEAD, OPTIMIZER, REST, RECOMPUTATION, TRANSFERS, ANSWERS, TEACHER)

NF4_BYTES = 4.127 / 8  # of a weight, with its share of the scales: Dettmers et al., QLoRA, arXiv 2305.14314, section 3
GRADIENT_AND_WEIGHT = 5  # passes of an update over them: norm, clipping (2), update (2, and the gradient is zeroed)

Counts = Mapping[str, tuple[float, float]]  # unit -> how many there are, forward and backward


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a step whose operations are alike."""

    part: str
    is_backward: bool
    products: float = 0.0  # operations in matrix products…
    side: float = 0.0  # …whose shortest side this is
    elementwise: float = 0.0  # operations elsewhere
    bytes: float = 0.0  # read and written
    launches: float = 0.0
    moved_bytes: float = 0.0  # between host and device
    dtype: str | None = None  # of the products, if it is not the compute dtype

    def times(self, factor: float, part: str) -> Piece:
        """Return this piece done again for a share of the layers, as another part."""
        return replace(
            self, part=part, products=factor * self.products, elementwise=factor * self.elementwise,
            bytes=factor * self.bytes, launches=factor * self.launches,
        )  # fmt: skip


def pieces_of(decoder: Decoder, ask: Ask, costs: StepCosts, documents: StepDocuments) -> list[Piece]:
    """Return all pieces of an optimizer step."""
    step = _Step(decoder, ask, costs, documents, adapted_by(decoder, ask))
    counts = units(step)
    pieces = [
        *_base_products(step), *_lora_products(step), *_norms_of_sums(step), *_attention(step, counts),
        *_unpacking(step, counts), *_head(step), _update(step), *_orthogonalized(step),
        *_by_card(step, counts),
    ]  # fmt: skip
    pieces += [*_recomputed(step, pieces), *_transfers(step)]
    if ask.compares:
        pieces += _forward_of(pieces, ANSWERS)
    return _recorded(pieces, step.micro_batches) if ask.kernels == "graph" else pieces


def _forward_of(pieces: list[Piece], part: str) -> list[Piece]:
    """Return the forward pass of a step, as a part of its own."""
    return [piece.times(1.0, part) for piece in pieces if not piece.is_backward and piece.part in (*IN_LAYERS, HEAD)]


@dataclass(frozen=True, slots=True)
class _Step:
    decoder: Decoder
    ask: Ask
    costs: StepCosts
    documents: StepDocuments
    on: Adapted

    @property
    def cells(self) -> int:
        return sum(self.documents.cells)

    @property
    def micro_batches(self) -> int:
        return len(self.documents.rows)

    @property
    def layers(self) -> tuple[int, int]:
        """The layers of the forward pass, and of the backward pass: below the lowest adapter there is none."""
        return self.decoder.layers, self.on.layers

    @property
    def adapted_layers(self) -> float:
        """How many layers have adapters, if all of them adapt the same."""
        return len(self.on.shapes) / len(self.on.inside) if self.on.inside else 0

    @property
    def chunks(self) -> int:
        rows = self.costs.loss_rows(self.decoder.vocab)
        return sum(-(-targets // rows) for targets in self.documents.targets)

    @property
    def targets(self) -> int:
        """Rows of the output head: without the fused loss those of all tokens."""
        return self.cells if has_plain_loss(self.decoder, self.ask) else sum(self.documents.targets)

    def groups(self) -> dict[str, list[Linear]]:
        """Return the adapted linear layers of one layer, by what they read: one group has one input."""
        by_input: dict[str, list[Linear]] = {}
        for name, linear in self.decoder.linears().items():
            if name in self.on.inside:
                by_input.setdefault(linear.reads, []).append(linear)
        return by_input


# --- units ------------------------------------------------------------------------------------------------------------


def units(step: _Step) -> Counts:
    """Return how many there are of each unit of a card in a step: calls, and numbers of the widths of all tokens."""
    decoder, m, cells = step.decoder, step.micro_batches, step.cells
    forward, backward = step.layers
    linears, documents = len(decoder.linears()), len(step.documents.lengths)
    # (queries, keys) of each block of equal size: the keys after a block are skipped. FlashAttention skips more.
    by_row, at_most = step.costs.attention == "rows", step.costs.attention_block
    rows = [width for width, group in zip(step.documents.widths, step.documents.rows, strict=True) for _ in group]
    lengths = rows if by_row else step.documents.computed.tolist()
    before = [0] * len(lengths) if by_row or step.documents.shared is None else step.documents.shared.tolist()
    sizes = [(length, -(-length // -(-length // at_most)), seen) for length, seen in zip(lengths, before, strict=True)]
    blocks = [
        (min(size, length - start), seen + min(start + size, length))
        for length, size, seen in sizes
        for start in range(0, length, size)
    ]
    pairs = step.documents.seen if step.costs.attention == "flash" else sum(q * k for q, k in blocks)
    short = 0 if step.documents.shared is not None else step.costs.attention_short
    batches = [batch for group in step.documents.rows for batch in alike([*chain(*group)], short, at_most)]
    batched = sum(map(len, batches))
    groups = step.groups()
    input_groups = m * len(groups) * step.adapted_layers
    inner_groups = m * ("inner" in groups) * step.adapted_layers
    calls: dict[str, tuple[float, float]] = {
        "micro-batch": (m, m),
        "step": (0.0, 1.0),
        "layer": (m * forward, m * backward),
        "linear": (m * forward * linears, m * (backward * linears - _below_lowest(step))),
        "adapted": (m * len(step.on.shapes), m * len(step.on.shapes)),
        "adapted in a step": (len(step.on.shapes), 0.0),
        "group": (input_groups, input_groups),
        "inner group": (inner_groups, inner_groups),
        "document": ((documents - batched) * forward, (documents - batched) * backward),
        "block": ((len(blocks) - batched) * forward, (len(blocks) - batched) * backward),
        "batch": (len(batches) * forward, len(batches) * backward),
        "chunk": (step.chunks, 0.0),
    }
    inputs = cells * step.adapted_layers * sum(group[0].in_ for group in groups.values())
    inner = cells * step.adapted_layers * decoder.inner * ("inner" in groups)
    outputs = cells * sum(out for out, _ in step.on.shapes)

    def by_pass(layer: float) -> tuple[float, float]:
        return layer * forward, layer * backward

    numbers: dict[str, tuple[float, float]] = {
        "hidden": by_pass(cells * decoder.hidden),
        "heads": by_pass(cells * decoder.width),
        "kv": by_pass(cells * decoder.kv_width),
        "inner": by_pass(cells * decoder.inner),
        "normed heads": by_pass(cells * (decoder.width + decoder.kv_width) * decoder.qk_norm),
        "inputs": (inputs, inputs),
        "inner inputs": (inner, inner),
        "outputs": (outputs, outputs),
        "scores": by_pass(decoder.heads * pairs),
        "logits": (step.targets * decoder.vocab, 0.0),
    }
    return calls | numbers


def _below_lowest(step: _Step) -> int:
    """The products of the lowest adapted layer that need no gradient of their input."""
    reads = [linear.reads for linear in step.decoder.linears().values()]
    return 0 if step.ask.trains_model or "before attention" not in step.on.reads else reads.count("before attention")


# --- products ---------------------------------------------------------------------------------------------------------


def _base_products(step: _Step) -> Iterator[Piece]:
    T, c = step.cells, step.ask.item_bytes
    stored = step.ask.quantization != "none" and step.ask.quantization not in step.costs.unpacking
    weight_bytes = _stored_bytes(step.ask) if stored else c
    for is_backward, layers in enumerate(step.layers):
        for linear in step.decoder.linears().values():
            first = is_backward and linear.reads == "before attention" and _below_lowest(step)
            times = layers - bool(first)
            size = linear.out * linear.in_
            # The gradient of a weight that is trained is another product.
            products = 2 if is_backward and step.ask.trains_model else 1
            moved = c * T * (linear.out + linear.in_) + step.micro_batches * weight_bytes * size
            side = min(linear.out, linear.in_, T / step.micro_batches)
            yield Piece(BASE, bool(is_backward), products * times * 2 * T * size, side, bytes=products * times * moved)


def _lora_products(step: _Step) -> Iterator[Piece]:
    T, c, r, layers = step.cells, step.ask.item_bytes, mean_rank(step.decoder, step.ask), step.adapted_layers
    for group in step.groups().values():
        width, ranks = group[0].in_, r * len(group)
        out = sum(linear.out for linear in group)
        into = layers * 2 * T * width * ranks  # A, for all of the group at once
        back = layers * 2 * T * out * r  # B, one after another
        layer_bytes = layers * c * T
        yield Piece(LORA, False, into, ranks, bytes=layer_bytes * (width + ranks))
        yield Piece(LORA, False, back, r, bytes=layer_bytes * (2 * out + ranks))  # added to what the base has written
        yield Piece(LORA, True, back, r, bytes=layer_bytes * (out + ranks))  # the gradient of u
        yield Piece(LORA, True, back, r, bytes=layer_bytes * (out + ranks))  # of B
        yield Piece(LORA, True, into, ranks, bytes=layer_bytes * (width + ranks))  # of A
        # Of the input: added to that of the base, or a tensor of its own until it has passed dropout.
        yield Piece(LORA, True, into, ranks, bytes=layer_bytes * ((1 if step.ask.dropout else 2) * width + ranks))


def _norms_of_sums(step: _Step) -> Iterator[Piece]:
    """W Aᵀ, from which DoRA's norms are computed: once in a step."""
    if step.ask.scales_outputs:
        size, r = sum(out * in_ for out, in_ in step.on.shapes), mean_rank(step.decoder, step.ask)
        yield Piece(SCALING, False, 2 * r * size, r, bytes=step.ask.item_bytes * size)


def _attention(step: _Step, counts: Counts) -> Iterator[Piece]:
    """2 products forward, 5 backward, which computes the scores again (arXiv 2307.08691, section 4.1)."""
    forward, backward = counts["scores"]
    side = min(step.decoder.head_dim, step.costs.attention_block)
    pair_operations = 2 * step.decoder.head_dim
    yield Piece(ATTENTION, False, 2 * pair_operations * forward, side)
    yield Piece(ATTENTION, True, 5 * pair_operations * backward, side)


def _head(step: _Step) -> Iterator[Piece]:
    decoder, c = step.decoder, step.ask.item_bytes
    size, rows = decoder.vocab * decoder.hidden, step.targets / max(1, step.chunks)
    products = 3 if step.ask.trains_model or step.ask.trains_head else 2
    moved = c * (products * step.chunks * size + 2 * step.targets * decoder.hidden)
    yield Piece(HEAD, False, products * 2 * step.targets * size, min(rows, decoder.hidden), bytes=moved)
    if step.ask.quantization in AFFINE_BITS and step.ask.quantization in step.costs.unpacking:
        yield _unpacked(step, step.micro_batches, size, is_backward=False)


# --- weights ----------------------------------------------------------------------------------------------------------


def _unpacking(step: _Step, counts: Counts) -> Iterator[Piece]:
    """Packed weights, unpacked for each product with one."""
    if step.ask.quantization not in step.costs.unpacking:
        return
    linears = step.decoder.linears()
    mean = sum(linear.out * linear.in_ for linear in linears.values()) / len(linears)
    for is_backward, count in enumerate(counts["linear"]):
        yield _unpacked(step, count, mean, is_backward=bool(is_backward))


def _unpacked(step: _Step, matrices: float, size: float, *, is_backward: bool) -> Piece:
    launches, moved, operations = step.costs.unpacking[step.ask.quantization]
    each, weights = _stored_bytes(step.ask) + (moved + 1) * step.ask.item_bytes, matrices * size
    return Piece(
        UNPACKING, is_backward, elementwise=operations * weights, bytes=each * weights, launches=launches * matrices
    )


def _stored_bytes(ask: Ask) -> float:
    """Bytes of a weight of the base as it is stored."""
    if ask.quantization in AFFINE_BITS:
        return AFFINE_BITS[ask.quantization] / 8 + 2 * ask.item_bytes / AFFINE_GROUP
    return {"none": ask.item_bytes, "nf4": NF4_BYTES, "int8": 1.0}[ask.quantization]


def _update(step: _Step) -> Piece:
    """Norm and clipping of the gradient, the optimizer with its slots read and written, the copy to compute with."""
    n, ask = num_trained(step.decoder, step.ask), step.ask
    copy = MASTER_BYTES + ask.item_bytes if ask.item_bytes < MASTER_BYTES else 0
    passes = n * ((GRADIENT_AND_WEIGHT + 1) * MASTER_BYTES + copy)
    return Piece(OPTIMIZER, True, bytes=2 * state_bytes(step.decoder, ask) + passes)


def _orthogonalized(step: _Step) -> Iterator[Piece]:
    """Newton and Schulz's iteration of Muon: three products a time, in float32, one of them of square matrices."""
    ask = step.ask
    if ask.optimizer != "muon":
        return
    iterations = OPTIMIZERS["muon"].defaults["iterations"]
    for one in tensors_of(step.decoder, ask):
        if is_matrix(one.name, one.shape):
            short, long = sorted(one.shape)
            each = 4 * short**2 * long + 2 * short**3
            yield Piece(OPTIMIZER, True, products=one.number * iterations * each, side=short, dtype="float32")


# --- what the card says, what is done again, and what is moved --------------------------------------------------------


def _by_card(step: _Step, counts: Counts) -> Iterator[Piece]:
    """Launches, numbers and elementwise operations: a piece for each part and pass."""
    costs = step.costs
    for part in PARTS:
        if (part == DROPOUT and not step.ask.dropout) or (part == SCALING and not step.ask.scales_outputs):
            continue
        for is_backward in (False, True):
            launches, numbers, operations = (
                sum(by_unit[is_backward] * counts[unit][is_backward] for unit, by_unit in table.get(part, {}).items())
                for table in (costs.launches, costs.numbers, costs.operations)
            )
            if launches or numbers or operations:
                moved = step.ask.item_bytes * numbers
                yield Piece(part, is_backward, elementwise=operations, bytes=moved, launches=launches)


def _recomputed(step: _Step, pieces: list[Piece]) -> Iterator[Piece]:
    """The forward pass of the layers that are not kept, once more."""
    checkpointing, layers = step.ask.checkpointing, step.decoder.layers
    again, share = IN_LAYERS, checkpointing.num_recomputed(layers) / layers
    if checkpointing.adapter_inputs:
        again, share = RECOMPUTED_INPUTS, step.on.layers / layers
    for piece in pieces:
        if share and not piece.is_backward and piece.part in again:
            yield piece.times(share, RECOMPUTATION)


def _recorded(pieces: list[Piece], micro_batches: int) -> list[Piece]:
    """Let the host launch each micro-step as one: model.kernels: graph replays all of it but the optimizer."""
    replayed = [piece if piece.part == OPTIMIZER else replace(piece, launches=0.0) for piece in pieces]
    return [*replayed, Piece(REST, False, launches=micro_batches)]


def _transfers(step: _Step) -> Iterator[Piece]:
    """Streamed layers, copied to the device for each pass, and offloaded inputs of segments, there and back."""
    ask, decoder, layers = step.ask, step.decoder, step.decoder.layers
    if ask.resident_layers is not None:
        one = _stored_bytes(ask) * decoder.linear_parameters / layers
        passes = 2 + ask.compares
        yield Piece(
            TRANSFERS, True, moved_bytes=passes * step.micro_batches * max(0, layers - ask.resident_layers) * one
        )
    if ask.checkpointing.offload:
        inputs = len(list(ask.checkpointing.segments(layers)))
        yield Piece(TRANSFERS, True, moved_bytes=2 * inputs * step.cells * decoder.hidden * ask.item_bytes)


# ----------------------------------------------------------------------------------------------------------------------
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
    model_flops: float  # by the formula of dualtune.doctor.bench.measure
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
        """Say how long a step takes, and that this is not a measurement."""
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


def predict(
    decoder: Shape, ask: Ask, documents: StepDocuments, limits: MachineLimits, teacher: tuple[Shape, Ask] | None = None
) -> StepTime:
    """Predict a step. EnvironmentFault if the backend does not say what its step takes, or for the plain kernels.

    `teacher`: of a model on the same device that says something of each token, as it is loaded.
    """
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
        dtypes = ", ".join(limits.product_flops)
        raise EnvironmentFault(f"no limit is known for products in {ask.dtype}; known: {dtypes}")
    pieces = pieces_of(decoder, ask, costs, documents)
    if teacher is not None and isinstance(teacher[0], Decoder):
        of_teacher = pieces_of(teacher[0], teacher[1], costs, documents)
        pieces += [replace(piece, dtype=teacher[1].dtype) for piece in _forward_of(of_teacher, TEACHER)]
    parts = [_part(name, [piece for piece in pieces if piece.part == name], ask.dtype, limits) for name in PARTS]
    launches, waits = sum(piece.launches for piece in pieces), (costs.waits + ask.compares) * len(documents.rows)
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
    in_own = limits.product_flops.get(piece.dtype or dtype, limits.product_flops[dtype])
    rate = in_own * share * _side_share(piece.side, limits.side_shares)
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
    tokens = int(documents.computed.sum())
    length = 2 * documents.seen / tokens - 1
    return tokens * flops_per_token(decoder, replace(ask, max_length=round(length)))
