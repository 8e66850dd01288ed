"""Input and output of a memory estimate, and the formulas that all backends share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, Protocol

from dualtune.activation_checkpointing import KEEP_ALL, ActivationCheckpointing
from dualtune.adapter.methods import FULL, METHODS
from dualtune.memory.counted import Shape
from dualtune.memory.shapes import Decoder
from dualtune.optimizer import OPTIMIZERS, SLOT_BYTES, RuleName, slots_of

Targets = tuple[str, ...] | Literal["all-linear"]
ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
AUTO_MICRO_BATCH_TOKENS = 2048
AFFINE_BITS: Mapping[str, int] = MappingProxyType({"affine4": 4, "affine8": 8})
AFFINE_GROUP = 64  # weights that share a scale and a bias
MASTER_BYTES = 4  # adapter and gradient are float32 for every dtype


class HasAdapter(Protocol):
    """An `Ask`, or the config's section `adapter`."""

    @property
    def method(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def targets(self) -> tuple[str, ...] | Literal["all-linear"]: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """The training setup to estimate. `estimate.ask_of` creates it from a config."""

    backend: str
    device: str  # a device kind from the backend's card
    quantization: str  # "none", "nf4", "int8", "affine4" or "affine8"
    dtype: str  # "float32", "bfloat16" or "float16"
    rank: int
    targets: tuple[str, ...] | Literal["all-linear"]
    micro_batch_tokens: int
    max_length: int
    packing: bool = True
    kernels: str = "auto"
    dropout: bool = True  # whether the adapter has dropout
    optimizer: RuleName = "adamw"
    averages: bool = False  # whether it also keeps an average of the weights
    method: str = "lora"
    checkpointing: ActivationCheckpointing = KEEP_ALL
    resident_layers: int | None = None  # how many layers of the base are on the device at once; None: all

    @property
    def trains_model(self) -> bool:
        """Whether all parameters of the model are trained, and no layer is adapted."""
        return self.method == FULL

    @property
    def num_slots(self) -> int:
        """The number of slots that the optimizer has, the average's included."""
        return len(slots_of(self.optimizer, averages=self.averages))

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def cells(self) -> int:
        """Tokens of the largest micro-batch, padding included: a row that does not fit is a separate micro-batch."""
        return max(self.micro_batch_tokens, padded(self.max_length))


@dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    bytes: int
    formula: str  # with the numbers filled in


@dataclass(frozen=True, slots=True)
class Estimate:
    """The peak of a training step, by part."""

    parts: tuple[MemoryPart, ...]

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def __getitem__(self, name: str) -> int:
        """Return the bytes of a part."""
        return next(part.bytes for part in self.parts if part.name == name)


@dataclass(frozen=True, slots=True)
class Adapted:
    """The linear layers that have an adapter."""

    shapes: tuple[tuple[int, int], ...]  # (out, in) of each
    inputs: int  # total input width of all modules
    inside: frozenset[str]  # their paths in a layer
    reads: frozenset[str | int]  # their inputs, as in `Linear`
    head: bool  # whether the output head is one of them
    layers: int  # the number of layers from the lowest adapted one; below it nothing is kept


@cache
def selected(shape: Shape, targets: Targets) -> Mapping[str, tuple[int, int]]:
    """Return the adapted linear layers. ConfigError if a target selects nothing, as when the model is loaded."""
    from dualtune.adapter.targets import matched, select_modules

    modules = shape.modules()
    # A whole path is that of the base's files, which the class may have inside another wrapper.
    named = matched((targets,) if isinstance(targets, str) else targets, modules)
    return select_modules(modules, tuple(named.values()))


@cache
def adapted(shape: Shape, targets: Targets) -> Adapted:
    """Describe the adapted linear layers. ConfigError as from `selected`."""
    found, places = selected(shape, targets), shape.places()
    in_layers = [places[path] for path in found if path in places]
    inside = frozenset(name for _, name in in_layers)
    # What is in no layer, as an embedding's projection, may come before all of them.
    outside = found.keys() - places.keys() - {shape.head}
    return Adapted(
        shapes=tuple(found.values()),
        inputs=sum(in_ for _, in_ in found.values()),
        inside=inside,
        reads=frozenset(linear.reads for name, linear in shape.linears().items() if name in inside),
        head=shape.head in found,
        layers=shape.layers if outside else shape.layers - min((i for i, _ in in_layers), default=shape.layers),
    )


def adapted_by(decoder: Shape, ask: Ask) -> Adapted:
    """Return the adapted linear layers. A model that is trained whole has none, but keeps the input of every layer."""
    if not ask.trains_model:
        return adapted(decoder, ask.targets)
    reads = frozenset(layer.reads for layer in decoder.linears().values())
    return Adapted(shapes=(), inputs=0, inside=frozenset(), reads=reads, head=False, layers=decoder.layers)


def num_trained(decoder: Shape, adapter: HasAdapter) -> int:
    """Return the number of trainable parameters. ConfigError if a target selects nothing."""
    if adapter.method == FULL:
        return decoder.num_parameters
    return _num_trained(decoder, adapter.method, adapter.rank, adapter.targets)


@cache
def _num_trained(decoder: Shape, method: str, rank: int, targets: Targets) -> int:
    return sum(METHODS[method].count(shape, rank) for shape in adapted(decoder, targets).shapes)


def optimizer(decoder: Shape, ask: Ask) -> MemoryPart:
    """Return gradient and optimizer state: the same on every backend."""
    n, entry = num_trained(decoder, ask), OPTIMIZERS[ask.optimizer]
    average = SLOT_BYTES if ask.averages else 0
    size = math.ceil((MASTER_BYTES + entry.bytes_per_parameter + average) * n)
    each = f" + {' and '.join(entry.slots)} × {entry.slot_bytes:.4g} B" if entry.slots else ""
    each += f" + average × {average:g} B" if average else ""
    return MemoryPart("optimizer", size, f"{n:,} weights × (gradient × {MASTER_BYTES} B{each})")


def affine_weights(decoder: Decoder, ask: Ask) -> MemoryPart:
    """Return the bytes of a base in MLX's quantization, with embedding and output head: the same on every backend."""
    c, bits, n = ask.item_bytes, AFFINE_BITS[ask.quantization], decoder.num_parameters
    matrices = [(layer.out, layer.in_) for layer in decoder.linears().values()] * decoder.layers
    matrices += [(decoder.vocab, decoder.hidden)] * (1 if decoder.tied else 2) + [(decoder.positions, decoder.hidden)]
    packed = sum(affine_bytes(out, in_, bits, c) for out, in_ in matrices)
    formula = f"{n - decoder.vector_parameters:,} parameters × ({bits} bits + 2 × {c} B for each {AFFINE_GROUP})"
    return MemoryPart("weights", packed + c * decoder.vector_parameters, f"{formula}, norms × {c} B")


def affine_bytes(out: int, in_: int, bits: int, c: int) -> int:
    """Return the bytes of a matrix. Matrices with rows that are no multiple of a group stay plain, as in mlx-lm."""
    n = out * in_
    return c * n if in_ % AFFINE_GROUP else n * bits // 8 + 2 * c * n // AFFINE_GROUP


def int8_weights(decoder: Decoder, ask: Ask) -> MemoryPart:
    """Return the bytes of a base in int8 (`base_model/int8.py`): the same on every backend."""
    c, n = ask.item_bytes, decoder.linear_parameters
    rows, plain = decoder.layers * sum(layer.out for layer in decoder.linears().values()), decoder.num_parameters - n
    formula = f"{n:,} parameters × 1 B + {rows:,} rows × 4 B, {plain:,} in embedding, head and norms × {c} B"
    return MemoryPart("weights", n + 4 * rows + c * plain, formula)


def has_plain_loss(decoder: Shape, ask: Ask) -> bool:
    """Return whether output head and loss are computed separately: if requested, or if the head is adapted.

    Or if the model changes its logits in a way that the loss does not know.
    """
    return ask.kernels == "reference" or not decoder.fused_loss or adapted_by(decoder, ask).head


def tokens_at_once(given: int | Literal["auto"], max_length: int) -> int:
    """Return train.micro_batch_tokens with `auto` resolved."""
    return max(AUTO_MICRO_BATCH_TOKENS, max_length) if given == "auto" else given


def padded(length: int) -> int:
    """Return the width of a row of `length` tokens: a copy of `padded` in data/batching/batches.py, a higher layer."""
    granule = 16
    while granule * 16 < length:
        granule *= 2
    return -(-length // granule) * granule
