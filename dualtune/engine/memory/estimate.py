"""An estimate of the memory of a training step, by formula, before anything is loaded.

docs/MEMORY_OPTIMIZATION_GUIDE.md lists what a formula cannot know; `benchmarks/memory_estimate.py` compares the
estimate with the engines' actual memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from dualtune.base.errors import ConfigError
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing, MemoryFormulas, card_of
from dualtune.engine.memory.counted import Counted, Shape
from dualtune.engine.memory.shapes import Decoder
from dualtune.model.beside import is_inside
from dualtune.model.experts import without_number
from dualtune.model.merge_rounding import AT_ONCE, MergeFor
from dualtune.model.methods import FULL, INITS, KEPT_INITS, METHODS
from dualtune.model.optimizer import OPTIMIZERS, SLOT_BYTES, RuleName, rule_of
from dualtune.model.stochastic_rounding import MasterWeights
from dualtune.model.targets import ALL_LAYERS, Pattern, Value, check_pattern, is_embedding, is_head, value_of

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.config.schema import CheckpointedLayers

# ----------------------------------------------------------------------------------------------------------------------
# Input and output of a memory estimate, and the formulas that all backends share.

Targets = tuple[str, ...] | Literal["all-linear"]
ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
AUTO_MICRO_BATCH_TOKENS = 2048
GRANULE = 16  # rows are padded to a multiple of it,
WIDTHS_PER_DOUBLING = 8  # and long rows to a coarser multiple, to limit the number of shapes
AFFINE_BITS: Mapping[str, int] = MappingProxyType({"affine4": 4, "affine8": 8})
AFFINE_GROUP = 64  # weights that share a scale and a bias
MERGE_ARRAYS = 6  # float32 arrays of the size of a weight while its merge is rounded
MASTER_BYTES = 4  # adapter and gradient are float32 for every dtype


class HasAdapter(Protocol):
    """An `Ask`, or the config's section `adapter`."""

    @property
    def method(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def targets(self) -> tuple[str, ...] | Literal["all-linear"]: ...

    @property
    def layers(self) -> str: ...

    @property
    def experts(self) -> bool: ...

    @property
    def rank_pattern(self) -> Mapping[str, int] | Pattern[int]: ...

    @property
    def init(self) -> str: ...


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
    layers: str = ALL_LAYERS
    experts: bool = False
    rank_pattern: Pattern[int] = ()
    init: str = INITS[0]
    merge_for: MergeFor = "none"
    master_weights: MasterWeights = "float32"
    checkpointing: ActivationCheckpointing = KEEP_ALL
    resident_layers: int | None = None  # how many layers of the base are on the device at once; None: all
    beside: int = 0  # parameters of the base that are trained beside the adapter
    trains_head: bool = False  # whether the output head is one of them, whole
    balances_experts: bool = False  # whether routers keep a gradient for each token and expert (`engine/routing.py`)
    compares: bool = False  # whether a step asks for the log-probabilities of all answers before it computes a gradient
    teacher: MemoryPart | None = None  # the weights of another model that is loaded beside
    packages: frozenset[str] | None = None  # those that libraries import where they are installed; None: as here

    @property
    def trains_model(self) -> bool:
        """Whether all parameters of the model are trained, and no layer is adapted."""
        return self.method == FULL

    @property
    def scales_outputs(self) -> bool:
        """Whether adapters scale the outputs of their layers, which are kept for the gradient of the scale: DoRA."""
        return not self.trains_model and "m" in METHODS[self.method].parts

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
    inputs: int  # total input width of all modules, of a stack of experts once
    inside: frozenset[str]  # their paths in a layer
    reads: frozenset[str | int]  # their inputs, as in `Linear`
    head: bool  # whether the output head is one of them
    layers: int  # the number of layers from the lowest adapted one; below it nothing is kept


@cache
def selected(shape: Shape, targets: Targets, layers: str, experts: bool = False) -> Mapping[str, tuple[int, int]]:
    """Return the adapted linear layers. ConfigError if a target selects nothing, as when the model is loaded."""
    from dualtune.model.targets import matched, select_modules

    modules = shape.modules()
    # A whole path is that of the base's files, which the class may have inside another wrapper.
    named = matched((targets,) if isinstance(targets, str) else targets, modules)
    return select_modules(modules, tuple(named.values()), layers, experts=experts)


@cache
def adapted(shape: Shape, targets: Targets, layers: str, experts: bool = False) -> Adapted:
    """Describe the adapted linear layers. ConfigError as from `selected`."""
    linears, places = selected(shape, targets, layers, experts), shape.places()
    in_layers = [places[path] for path in linears if path in places]
    inside = frozenset(name for _, name in in_layers)
    # What is in no layer, as an embedding's projection, may come before all of them.
    outside = linears.keys() - places.keys() - {shape.head}
    return Adapted(
        shapes=tuple(linears.values()),
        inputs=sum(in_ for _, in_ in {without_number(path): shape for path, shape in linears.items()}.values()),
        inside=inside,
        reads=frozenset(linear.reads for name, linear in shape.linears().items() if name in inside),
        head=shape.head in linears,
        layers=shape.layers if outside else shape.layers - min((i for i, _ in in_layers), default=shape.layers),
    )


def adapted_by(decoder: Shape, ask: Ask) -> Adapted:
    """Return the adapted linear layers. Full fine-tuning has none, but keeps every input."""
    if not ask.trains_model:
        on = adapted(decoder, ask.targets, ask.layers, ask.experts)
        # The gradient goes down to the embedding, whatever is trained: a final norm alone is rare.
        return replace(on, layers=decoder.layers) if ask.beside else on
    reads = frozenset(layer.reads for layer in decoder.linears().values())
    return Adapted(shapes=(), inputs=0, inside=frozenset(), reads=reads, head=False, layers=decoder.layers)


def num_trained(decoder: Shape, adapter: HasAdapter) -> int:
    """Return the number of trainable parameters: so many have a gradient and the optimizer's slots.

    ConfigError if a target selects nothing.
    """
    if adapter.method == FULL:
        return decoder.num_parameters
    beside = adapter.beside if isinstance(adapter, Ask) else 0
    return beside + _num_trained(decoder, adapter.method, *_rank_settings(adapter, 1))


def num_kept(decoder: Shape, adapter: HasAdapter) -> int:
    """Return how many numbers a start has that is kept beside what is trained."""
    if adapter.method == FULL or adapter.init not in KEPT_INITS:
        return 0
    return _num_trained(decoder, "lora", *_rank_settings(adapter, 1))


def ranks(decoder: Shape, adapter: HasAdapter) -> Mapping[str, int]:
    """Return the rank of each adapted layer, twice that if the start stays beside what is trained.

    ConfigError if a target of the pattern selects nothing.
    """
    return _ranks(decoder, *_rank_settings(adapter, 2 if adapter.init in KEPT_INITS else 1))


def _rank_settings(adapter: HasAdapter, times: int) -> tuple[int, Pattern[int], Targets, str, bool]:
    """Return what the ranks depend on: rank and pattern, `times` as large, targets, layers and experts."""
    pattern = adapter.rank_pattern if isinstance(adapter.rank_pattern, tuple) else (*adapter.rank_pattern.items(),)
    pattern = tuple((target, times * rank) for target, rank in pattern)
    return times * adapter.rank, pattern, adapter.targets, adapter.layers, adapter.experts


def mean_rank(decoder: Shape, ask: Ask) -> float:
    """Return the rank of an adapted layer, or their mean if they have several."""
    if ask.trains_model or not (ask.rank_pattern or ask.init in KEPT_INITS):
        return ask.rank
    all_ranks = ranks(decoder, ask).values()
    return sum(all_ranks) / len(all_ranks)


def num_beside(decoder: Shape, config: Config) -> int:
    """Return how many parameters of the base are trained beside an adapter, as far as the shapes say it."""
    adapter, matrices = config.adapter, decoder.modules()
    if adapter.trains_model:
        return 0
    tables = _trained_tables(decoder, config)
    whole = [module for module in adapter.train_modules if not _is_table(module)]
    linear = [out * in_ for path, (out, in_) in matrices.items() if any(is_inside(path, module) for module in whole)]
    norms = [module for module in whole if not any(is_inside(path, module) for path in matrices)]
    vectors = sum(decoder.hidden * (decoder.layers if "layernorm" in module else 1) for module in norms)
    rows = len({*adapter.rows, *(() if tables else (token.text for token in config.data.added_tokens))})
    both = 2 if decoder.head in matrices else 1
    return (
        decoder.hidden * (decoder.vocab * tables + rows * both) + sum(linear) + vectors + _num_biases(decoder, config)
    )


def _num_biases(decoder: Shape, config: Config) -> int:
    """Return the size of the biases that are trained, as far as a formula knows them: they are few."""
    if config.adapter.bias == "none" or isinstance(decoder, Counted):
        return 0
    linears, adapter = decoder.linears(), config.adapter
    chosen = {*decoder.biased}
    if adapter.bias == "lora_only":
        chosen &= adapted(decoder, adapter.targets, adapter.layers, adapter.experts).inside
    of_norms = decoder.layer_norms * decoder.hidden * (decoder.is_gpt2 and adapter.bias == "all")
    return decoder.layers * (sum(linears[name].out for name in chosen) + of_norms)


def _trained_tables(decoder: Shape, config: Config) -> int:
    """Return how many of embedding and output head are trained whole; they count once if they are one."""
    named = sum(map(_is_table, config.adapter.train_modules))
    return named if decoder.head in decoder.modules() else min(named, 1)


def _is_table(module: str) -> bool:
    return is_embedding(f"{module}.weight") or is_head(f"{module}.weight")


def num_scaled(decoder: Shape, ask: Ask) -> int:
    """Return how many outputs of layers are scaled by adapters."""
    return (
        sum(out for out, _ in adapted(decoder, ask.targets, ask.layers, ask.experts).shapes)
        if ask.scales_outputs
        else 0
    )


@cache
def _ranks(
    decoder: Shape, rank: int, pattern: Pattern[int], targets: Targets, layers: str, experts: bool
) -> Mapping[str, int]:
    modules = selected(decoder, targets, layers, experts)
    pattern = checked_pattern(decoder, "rank_pattern", pattern, modules)
    return {module: value_of(module, pattern, rank) for module in modules}


@cache
def _num_trained(
    decoder: Shape, method: str, rank: int, pattern: Pattern[int], targets: Targets, layers: str, experts: bool
) -> int:
    count, shapes = METHODS[method].count, adapted(decoder, targets, layers, experts).shapes
    return sum(map(count, shapes, _ranks(decoder, rank, pattern, targets, layers, experts).values()))


def checked_pattern(shape: Shape, key: str, pattern: Pattern[Value], modules: Collection[str]) -> Pattern[Value]:
    """Return adapter.<key> with the names that the class has. ConfigError as when the model is loaded."""
    from dualtune.model.targets import matched

    names = matched((target for target, _ in pattern), shape.modules())
    pattern = tuple((names[target], value) for target, value in pattern)
    check_pattern(key, pattern, modules)
    return pattern


class TrainedTensors(NamedTuple):
    """Tensors of one shape that are trained. The name says what they are, not where."""

    name: str
    shape: tuple[int, ...]
    number: int


def _matrices_of(decoder: Shape) -> Counter[tuple[str, tuple[int, ...]]]:
    """Return how many matrices of each name and shape a model has."""
    matrices = Counter[tuple[str, tuple[int, ...]]]()
    if isinstance(decoder, Counted):
        for layer in (*decoder.by_layer, decoder.outside):
            name = "embed_tokens.weight" if layer is decoder.outside else "layers.weight"
            matrices.update({(name, (m.out, m.in_)): m.number for m in layer.matrices})
        return matrices
    for linear in decoder.linears().values():
        matrices["layers.weight", (linear.out, linear.in_)] += decoder.layers
    for rows in (decoder.vocab,) * (1 if decoder.tied else 2) + (decoder.positions,) * (decoder.positions > 0):
        matrices["embed_tokens.weight", (rows, decoder.hidden)] += 1
    return matrices


def tensors_of(decoder: Shape, ask: Ask) -> tuple[TrainedTensors, ...]:
    """Return what is trained, by shape. Everything but the matrices of a model or an adapter counts as one vector."""
    if ask.method == FULL:
        tensors = _matrices_of(decoder)
    else:
        shapes, of_method = adapted_by(decoder, ask).shapes, METHODS[ask.method]
        tensors = Counter(
            (parameter.peft, of_method.shapes(shape, rank)[parameter.part])
            for shape, rank in zip(shapes, _ranks(decoder, *_rank_settings(ask, 1)).values(), strict=True)
            for parameter in of_method.parameters
        )
    rest = num_trained(decoder, ask) - sum(math.prod(shape) * number for (_, shape), number in tensors.items())
    if rest:
        tensors["norm.weight", (rest,)] = 1
    return tuple(TrainedTensors(name, shape, number) for (name, shape), number in tensors.items())


def state_bytes(decoder: Shape, ask: Ask) -> int:
    """Return the bytes of the optimizer's slots, the average's included."""
    entry = OPTIMIZERS[ask.optimizer]
    own = sum(one.number * entry.bytes_of(one.name, one.shape) for one in tensors_of(decoder, ask))
    return math.ceil(own + SLOT_BYTES * num_trained(decoder, ask) * ask.averages)


def trained_model(decoder: Shape, ask: Ask) -> MemoryPart:
    """The masters of full fine-tuning, and their copy in the compute dtype if that is another one."""
    masters, c, n = ITEM_BYTES[ask.master_weights], ask.item_bytes, decoder.num_parameters
    each = masters + (c if c < masters else 0)
    return MemoryPart("weights", each * n, f"{n:,} parameters × {each} B")


def optimizer(decoder: Shape, ask: Ask) -> MemoryPart:
    """Return gradient and optimizer state: the same on every backend."""
    n, entry, state = num_trained(decoder, ask), OPTIMIZERS[ask.optimizer], state_bytes(decoder, ask)
    slots = f" + {' and '.join(entry.slots)} × {entry.slot_bytes:.4g} B" if entry.slots and not entry.shapes else ""
    slots += f" + average × {SLOT_BYTES:g} B" * ask.averages
    formula = f"{n:,} weights × (gradient × {MASTER_BYTES} B{slots})"
    if entry.shapes:
        formula += f" + {state - math.ceil(SLOT_BYTES * n * ask.averages):,} B of {', '.join(entry.slots)}"
    return MemoryPart("optimizer", MASTER_BYTES * n + state, formula)


def merges(decoder: Shape, ask: Ask) -> MemoryPart:
    """Return the rounded merges of adapter.merge_for: those of all layers, or of the one that computes if they are
    streamed.

    With dropout each module keeps what dropout changes of its input, and a mask; of DoRA a second output.
    """
    on, c, T = adapted_by(decoder, ask), ask.item_bytes, ask.cells
    shapes = on.shapes
    n, largest = sum(map(math.prod, shapes)), max(map(math.prod, shapes), default=0)
    if ask.experts:
        largest = max(largest, min(AT_ONCE, n))
    if ask.resident_layers is not None:
        n //= max(on.layers, 1)
    formula = f"{n:,} weights × {c} B + {MERGE_ARRAYS} × {largest:,} × 4 B while one is rounded"
    size = c * n + MERGE_ARRAYS * 4 * largest
    if ask.dropout:
        token_bytes = sum((c + 1) * in_ + c * out * ask.scales_outputs for out, in_ in shapes)
        segments = [*map(len, ask.checkpointing.segments(decoder.layers))]
        at_once = decoder.layers - sum(segments) + max(segments, default=0)
        dropped = T * token_bytes * at_once // decoder.layers
        size, formula = size + dropped, f"{formula} + {T:,} tokens × {token_bytes:,} B of dropout in all layers"
    return MemoryPart("merges", size, formula)


def largest_update(decoder: Shape, ask: Ask, chunk: int) -> int:
    """Return how many weights are updated at a time: a chunk of them, or the largest tensor that is needed whole."""
    by_tensor, n = OPTIMIZERS[ask.optimizer].by_tensor, min(num_trained(decoder, ask), chunk)
    if by_tensor is None:
        return n
    return max([n, *(math.prod(one.shape) for one in tensors_of(decoder, ask) if by_tensor(one.name, one.shape))])


def affine_weights(decoder: Decoder, ask: Ask) -> MemoryPart:
    """Return the bytes of a base in MLX's quantization, with embedding and output head: the same on every backend."""
    c, bits, n = ask.item_bytes, AFFINE_BITS[ask.quantization], decoder.num_parameters
    matrices = [(layer.out, layer.in_) for layer in decoder.linears().values()] * decoder.layers
    matrices += [(decoder.vocab, decoder.hidden)] * (1 if decoder.tied else 2) + [(decoder.positions, decoder.hidden)]
    packed = sum(affine_bytes(out, in_, bits, c) for out, in_ in matrices)
    formula = f"{n - decoder.vector_parameters:,} parameters × ({bits} bits + 2 × {c} B for each {AFFINE_GROUP})"
    return MemoryPart("weights", packed + c * decoder.vector_parameters, f"{formula}, norms × {c} B")


def affine_bytes(out: int, in_: int, bits: int, c: int) -> int:
    """Return the bytes of a matrix. Matrices with rows that are not a multiple of a group stay plain, as in mlx-lm."""
    n = out * in_
    return c * n if in_ % AFFINE_GROUP else n * bits // 8 + 2 * c * n // AFFINE_GROUP


def packed_bytes(out: int, in_: int, quantization: str, c: int) -> int:
    """Return the bytes of a matrix in a quantization that is the same on every backend: affine, or int8."""
    if quantization == "int8":
        return out * in_ + 4 * out
    return affine_bytes(out, in_, AFFINE_BITS[quantization], c)


def int8_weights(decoder: Decoder, ask: Ask) -> MemoryPart:
    """Return the bytes of a base in int8 (`model/int8.py`): the same on every backend."""
    c, n = ask.item_bytes, decoder.linear_parameters
    rows, plain = decoder.layers * sum(layer.out for layer in decoder.linears().values()), decoder.num_parameters - n
    formula = f"{n:,} parameters × 1 B + {rows:,} rows × 4 B, {plain:,} in embedding, head and norms × {c} B"
    return MemoryPart("weights", n + 4 * rows + c * plain, formula)


def libraries(alone: int, optional: Mapping[str, int], ask: Ask) -> tuple[int, str]:
    """Return the bytes of Python with the backend's libraries, and of the packages that these import where they are
    installed, and the formula."""
    imported = [name for name in optional if (_is_installed(name) if ask.packages is None else name in ask.packages)]
    parts = [f"{alone:,} B of libraries", *(f"{optional[name]:,} B of {name}" for name in imported)]
    return alone + sum(optional[name] for name in imported), " + ".join(parts)


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def has_plain_loss(decoder: Shape, ask: Ask) -> bool:
    """Return whether output head and loss are computed separately: if requested, or if the head is adapted.

    Or if the model changes its logits in a way that the loss does not know.
    """
    return ask.kernels == "reference" or not decoder.fused_loss or adapted_by(decoder, ask).head


def tokens_at_once(configured: int | Literal["auto"], max_length: int) -> int:
    """Return train.micro_batch_tokens with `auto` resolved."""
    return max(AUTO_MICRO_BATCH_TOKENS, max_length) if configured == "auto" else configured


def padded(length: int) -> int:
    """Return the padded width of a row of `length` tokens: one of at most eight widths per doubling."""
    granule = GRANULE
    while granule * WIDTHS_PER_DOUBLING * 2 < length:
        granule *= 2
    return -(-length // granule) * granule


# ----------------------------------------------------------------------------------------------------------------------
__all__ = ["Adapted", "Ask", "Estimate", "adapted", "ask_of", "estimate", "longest_that_fits", "padded"]

FULL_CHECKPOINTING = ActivationCheckpointing("all")
SHORTEST, LONGEST = 64, 1 << 20  # tokens; the range of `longest_that_fits`


def estimate(decoder: Shape, ask: Ask) -> Estimate:
    """Return the peak of a training step. ConfigError if a target selects nothing or the backend has no formulas."""
    formulas = _formulas(ask.backend)
    parts = formulas.parts if isinstance(decoder, Decoder) else formulas.counted_parts
    if parts is None:
        raise ConfigError(f"memory: the backend '{ask.backend}' has no formulas for a model of this family")
    all_parts = parts(decoder, ask)
    if ask.merge_for != "none":
        all_parts += (merges(decoder, ask),)
    return Estimate(all_parts if ask.teacher is None else (*all_parts, ask.teacher))


def _formulas(backend: str) -> MemoryFormulas:
    formulas = card_of(backend).memory
    if formulas is None:
        raise ConfigError(f"memory: the backend '{backend}' has no formulas, so there is no estimate for it")
    return formulas


def ask_of(config: Config, decoder: Shape, backend: str, device: str) -> Ask:
    """Return the `Ask` of a config. A base with quantization as stored ("auto") counts as not quantized.

    ConfigError if a target selects nothing, or if the backend lacks the device or the quantization.
    """
    quantization = "none" if config.model.quantization == "auto" else config.model.quantization
    on = card_of(backend).device(device)
    if on is None:
        kinds = ", ".join(card_device.kind for card_device in card_of(backend).devices) or "none"
        raise ConfigError(f"device: got '{device}', the backend '{backend}' has: {kinds}")
    if quantization not in on.quantizations:
        allowed = ", ".join(("auto", *on.quantizations))
        raise ConfigError(f"model.quantization: got '{quantization}', the backend '{backend}' honours: {allowed}")
    # A target that selects nothing is an error now, not when the estimate asks for it.
    if not config.adapter.trains_model:
        alphas = (*config.adapter.alpha_pattern.items(),)
        checked_pattern(decoder, "alpha_pattern", alphas, ranks(decoder, config.adapter))
    longest = config.data.max_length
    return Ask(
        backend=backend,
        device=device,
        quantization=quantization,
        dtype=on.auto_dtype if config.model.dtype == "auto" else config.model.dtype,
        rank=config.adapter.rank,
        method=config.adapter.method,
        checkpointing=checkpointing_of(config),
        resident_layers=config.memory.resident_layers_or_none,
        targets=config.adapter.targets,
        layers=config.adapter.layers,
        experts=config.adapter.experts,
        rank_pattern=(*config.adapter.rank_pattern.items(),),
        init=config.adapter.init,
        merge_for=config.adapter.merge_for,
        master_weights=config.adapter.master_weights,
        micro_batch_tokens=tokens_at_once(config.train.micro_batch_tokens, longest),
        max_length=longest,
        packing=config.data.packing,
        kernels=config.model.kernels,
        dropout=config.adapter.dropout > 0 and not config.adapter.trains_model,
        optimizer=rule_of(config.train.optimizer, config.train.schedule),
        averages=config.train.average != "none",
        beside=num_beside(decoder, config),
        trains_head=_trained_tables(decoder, config) > 0,
        balances_experts=bool(config.train.router_aux_loss_coef),
        compares=config.looks_first,
    )


def checkpointing_of(config: Config) -> ActivationCheckpointing:
    """Return memory.checkpointing as configured; `auto` counts as none, or as full if another key needs it.

    ConfigError for a value that contradicts memory.resident_layers or memory.offload.
    """
    memory = config.memory
    offload, streamed = memory.offload == "activations", memory.resident_layers != "all"
    if streamed:
        where, rule = f"memory.resident_layers={memory.resident_layers}", "every layer is recomputed by itself"
        return replace(_full_because(memory.checkpointing, where, f"{rule}; allowed: auto, full"), offload=offload)
    if offload and memory.checkpointing in ("auto", "none", "adapter_inputs"):
        where, rule = "memory.offload=activations", "the inputs of recomputed layers are moved"
        allowed = f"{rule}; allowed: auto, full, {{layers: …}}"
        return replace(_full_because(memory.checkpointing, where, allowed), offload=True)
    match value := memory.checkpointing:
        case "auto" | "none":
            return KEEP_ALL
        case "adapter_inputs":
            return ActivationCheckpointing(adapter_inputs=True)
        case "full":
            return replace(FULL_CHECKPOINTING, offload=offload)
        case _:
            return ActivationCheckpointing(value.layers, value.every, offload=offload)


def _full_because(value: str | CheckpointedLayers, where: str, rule: str) -> ActivationCheckpointing:
    """Return the setting that recomputes everything, which another key needs. ConfigError, with the rule, for a value
    that is against it.

    The backward pass of a streamed layer follows its recomputation.
    """
    if value not in ("auto", "full"):
        got = value if isinstance(value, str) else f"{{layers: {value.layers}, every: {value.every}}}"
        raise ConfigError(f"memory.checkpointing: got {got}, but with {where} {rule}")
    return FULL_CHECKPOINTING if value == "full" else replace(FULL_CHECKPOINTING, reason=f"auto: needed by {where}")


def longest_that_fits(decoder: Shape, ask: Ask, budget_bytes: int) -> int:
    """Return the tokens of the longest document that fits in the budget, if it is the only one in its micro-batch.

    0 if not even 64 tokens fit. The model's limit of positions is not considered.
    """

    def fits(length: int) -> bool:
        alone = replace(ask, max_length=length, micro_batch_tokens=length)
        return estimate(decoder, alone).total_bytes <= budget_bytes

    starts = [SHORTEST, *(border + 1 for border in _formulas(ask.backend).borders), LONGEST + 1]
    longest = (last_that_fits(fits, low, high) for low, high in reversed([*pairwise(starts)]) if fits(low))
    return next(longest, 0)


def last_that_fits(fits: Callable[[int], bool], low: int, high: int, granule: int = 1) -> int:
    """Return the largest number in [low, high) that fits, to a granule, by bisection.

    `low` must fit, and beyond a number that does not fit, none does.
    """
    while high - low > granule:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
