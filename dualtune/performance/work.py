"""What a training step computes, reads and writes, part by part: by formula from the model's shape, and by the card.

The products follow from the shape: forward 2 operations for each weight and token, backward as many for the gradient of
the input, and of the weight only for what is trained. A product reads its operands and writes its result once. What a
backend's kernels do between the products (numbers read and written, elementwise operations, operator calls) stands in
its card as `StepCosts`: so many for each of a unit, forward and backward. `units` counts the units of a step.

Legend: T tokens of a micro-batch with padding, r rank, c bytes of a number in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dualtune.card import StepCosts
from dualtune.memory.ask import (
    AFFINE_BITS,
    AFFINE_GROUP,
    MASTER_BYTES,
    Adapted,
    Ask,
    adapted_by,
    has_plain_loss,
    num_trained,
)
from dualtune.memory.shapes import Decoder, Linear
from dualtune.optimizer import OPTIMIZERS
from dualtune.performance.documents import StepDocuments

BASE, LORA, ATTENTION, NORMS = "base products", "LoRA products", "attention", "norms and residuals"
ROTARY, ACTIVATION, DROPOUT, UNPACKING = "rotary", "activation", "dropout", "unpacking"
HEAD, OPTIMIZER, REST = "head and loss", "optimizer", "rest"
RECOMPUTATION, TRANSFERS = "recomputation", "transfers"
IN_LAYERS = (BASE, LORA, ATTENTION, NORMS, ROTARY, ACTIVATION, DROPOUT, UNPACKING)
REMADE = (NORMS, DROPOUT)  # what memory.checkpointing: remade computes again
PARTS = (*IN_LAYERS, HEAD, OPTIMIZER, REST, RECOMPUTATION, TRANSFERS)

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
        *_base_products(step), *_lora_products(step), *_attention(step, counts), *_unpacking(step, counts),
        *_head(step), _update(step), *_by_card(step, counts),
    ]  # fmt: skip
    pieces += [*_recomputed(step, pieces), *_transfers(step)]
    return _recorded(pieces, step.micro_batches) if ask.kernels == "graph" else pieces


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
        found: dict[str, list[Linear]] = {}
        for name, linear in self.decoder.linears().items():
            if name in self.on.inside:
                found.setdefault(linear.reads, []).append(linear)
        return found


# --- units ------------------------------------------------------------------------------------------------------------


def units(step: _Step) -> Counts:
    """Return how many there are of each unit of a card in a step: calls, and numbers of the widths of all tokens."""
    decoder, m, cells = step.decoder, step.micro_batches, step.cells
    forward, backward = step.layers
    linears, documents = len(decoder.linears()), len(step.documents.lengths)
    groups, pairs = step.groups(), (computed_pairs(step), computed_blocks(step))
    input_groups = m * len(groups) * step.adapted_layers
    inner_groups = m * ("inner" in groups) * step.adapted_layers
    calls: dict[str, tuple[float, float]] = {
        "micro-batch": (m, m),
        "step": (0.0, 1.0),
        "layer": (m * forward, m * backward),
        "linear": (m * forward * linears, m * (backward * linears - _below_lowest(step))),
        "adapted": (m * len(step.on.shapes), m * len(step.on.shapes)),
        "group": (input_groups, input_groups),
        "inner group": (inner_groups, inner_groups),
        "document": (documents * forward, documents * backward),
        "block": (pairs[1] * forward, pairs[1] * backward),
        "chunk": (step.chunks, 0.0),
    }
    inputs = cells * step.adapted_layers * sum(group[0].in_ for group in groups.values())
    inner = cells * step.adapted_layers * decoder.inner * ("inner" in groups)
    numbers: dict[str, tuple[float, float]] = {
        "hidden": _by_pass(step, cells * decoder.hidden),
        "heads": _by_pass(step, cells * decoder.width),
        "kv": _by_pass(step, cells * decoder.kv_width),
        "inner": _by_pass(step, cells * decoder.inner),
        "normed heads": _by_pass(step, cells * (decoder.width + decoder.kv_width) * decoder.qk_norm),
        "inputs": (inputs, inputs),
        "inner inputs": (inner, inner),
        "scores": _by_pass(step, decoder.heads * pairs[0]),
        "logits": (step.targets * decoder.vocab, 0.0),
    }
    return calls | numbers


def _by_pass(step: _Step, each: float) -> tuple[float, float]:
    forward, backward = step.layers
    return each * forward, each * backward


def _below_lowest(step: _Step) -> int:
    """The products of the lowest adapted layer that need no gradient of their input."""
    reads = [linear.reads for linear in step.decoder.linears().values()]
    return 0 if step.ask.trains_model or "before attention" not in step.on.reads else reads.count("before attention")


def computed_pairs(step: _Step) -> int:
    """Return how many pairs of query and key the attention of a layer multiplies, including those it masks."""
    if step.costs.attention == "flash":
        return step.documents.seen
    return sum(queries * keys for queries, keys in _blocks(step))


def computed_blocks(step: _Step) -> int:
    return len(_blocks(step))


def _blocks(step: _Step) -> list[tuple[int, int]]:
    """(queries, keys) of each block of equal size: the keys after a block are skipped."""
    documents, at_most = step.documents, step.costs.attention_block
    rows = [width for width, group in zip(documents.widths, documents.rows, strict=True) for _ in group]
    lengths = rows if step.costs.attention == "rows" else documents.lengths.tolist()
    sizes = [(length, -(-length // -(-length // at_most))) for length in lengths]
    return [
        (min(size, length - start), min(start + size, length))
        for length, size in sizes
        for start in range(0, length, size)
    ]


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
            yield Piece(
                BASE, bool(is_backward), products * times * 2 * T * size, min(linear.out, linear.in_, _rows(step)),
                bytes=products * times * moved,
            )  # fmt: skip


def _rows(step: _Step) -> float:
    return step.cells / step.micro_batches


def _lora_products(step: _Step) -> Iterator[Piece]:
    T, c, r, layers = step.cells, step.ask.item_bytes, step.ask.rank, step.adapted_layers
    for group in step.groups().values():
        width, ranks = group[0].in_, r * len(group)
        out = sum(linear.out for linear in group)
        into = layers * 2 * T * width * ranks  # A, for all of the group at once
        back = layers * 2 * T * out * r  # B, one after another
        each = layers * c * T
        yield Piece(LORA, False, into, ranks, bytes=each * (width + ranks))
        yield Piece(LORA, False, back, r, bytes=each * (2 * out + ranks))  # added to what the base has written
        yield Piece(LORA, True, back, r, bytes=each * (out + ranks))  # the gradient of u
        yield Piece(LORA, True, back, r, bytes=each * (out + ranks))  # of B
        yield Piece(LORA, True, into, ranks, bytes=each * (width + ranks))  # of A
        # Of the input: added to that of the base, or a tensor of its own until it has passed dropout.
        yield Piece(LORA, True, into, ranks, bytes=each * ((1 if step.ask.dropout else 2) * width + ranks))


def _attention(step: _Step, counts: Counts) -> Iterator[Piece]:
    """2 products forward, 5 backward, which computes the scores again (arXiv 2307.08691, section 4.1)."""
    forward, backward = counts["scores"]
    side = min(step.decoder.head_dim, step.costs.attention_block)
    each = 2 * step.decoder.head_dim
    yield Piece(ATTENTION, False, 2 * each * forward, side)
    yield Piece(ATTENTION, True, 5 * each * backward, side)


def _head(step: _Step) -> Iterator[Piece]:
    decoder, c = step.decoder, step.ask.item_bytes
    size, rows = decoder.vocab * decoder.hidden, step.targets / max(1, step.chunks)
    products = 3 if step.ask.trains_model else 2
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
    slots = OPTIMIZERS[ask.optimizer].bytes_per_parameter + MASTER_BYTES * ask.averages
    copy = MASTER_BYTES + ask.item_bytes if ask.item_bytes < MASTER_BYTES else 0
    return Piece(OPTIMIZER, True, bytes=n * (2 * slots + (GRADIENT_AND_WEIGHT + 1) * MASTER_BYTES + copy))


# --- what the card says, what is done again, and what is moved --------------------------------------------------------


def _by_card(step: _Step, counts: Counts) -> Iterator[Piece]:
    """Launches, numbers and elementwise operations: a piece for each part and pass."""
    costs = step.costs
    for part in PARTS:
        if part == DROPOUT and not step.ask.dropout:
            continue
        for is_backward in (False, True):
            launches, numbers, operations = (
                sum(each[is_backward] * counts[unit][is_backward] for unit, each in table.get(part, {}).items())
                for table in (costs.launches, costs.numbers, costs.operations)
            )
            if launches or numbers or operations:
                moved = step.ask.item_bytes * numbers
                yield Piece(part, is_backward, elementwise=operations, bytes=moved, launches=launches)


def _recomputed(step: _Step, pieces: list[Piece]) -> Iterator[Piece]:
    """The forward pass of the layers that are not kept, once more."""
    checkpointing, layers = step.ask.checkpointing, step.decoder.layers
    again, share = IN_LAYERS, checkpointing.num_recomputed(layers) / layers
    if checkpointing.remade:
        again, share = REMADE, step.on.layers / layers
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
        yield Piece(TRANSFERS, True, moved_bytes=2 * step.micro_batches * max(0, layers - ask.resident_layers) * one)
    if ask.checkpointing.offload:
        inputs = len(list(ask.checkpointing.segments(layers)))
        yield Piece(TRANSFERS, True, moved_bytes=2 * inputs * step.cells * decoder.hidden * ask.item_bytes)
