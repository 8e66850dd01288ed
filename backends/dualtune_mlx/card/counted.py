"""The memory that the MLX engine needs for a model whose shapes are counted, by part.

The moments of a step are those of `dualtune_mlx.card.memory`, with the widest product in the place of the feed-forward
block.
"""

from __future__ import annotations

from dualtune.engine.memory.counted import Counted, CountedLayer, stored_bytes, variant
from dualtune.engine.memory.estimate import (
    AFFINE_BITS,
    MASTER_BYTES,
    Ask,
    MemoryPart,
    adapted_by,
    has_plain_loss,
    num_kept,
    num_scaled,
    num_trained,
    optimizer,
    packed_bytes,
    ranks,
    selected,
    trained_model,
)
from dualtune_mlx.card import memory


def parts(counted: Counted, ask: Ask) -> tuple[MemoryPart, ...]:
    """Return the parts of the peak: what is always there, what the forward pass keeps, and the largest moment."""
    own = (weights(counted, ask), adapter(counted, ask)) if not ask.trains_model else ()
    always = (*(own or (trained_model(counted, ask),)), optimizer(counted, ask))
    at_end, *later = activations(counted, ask)
    scores, block = attention(counted, ask), feed_forward(counted, ask)
    plain = (memory.loss(counted, ask), scores, block, memory.update(counted, ask, at_end))
    if ask.trains_model:
        plain = (*plain, memory.slopes(counted, ask, at_end))
    moments = [(at_end, moment) for moment in plain]
    both = MemoryPart("workspace", scores.bytes + block.bytes, f"{scores.formula} + {block.formula}, recomputed")
    moments += [(recomputed, both) for recomputed in later]
    most = max(moments, key=lambda moment: moment[0].bytes + moment[1].bytes)
    return (*always, *most, memory.reserve(ask))


def weights(counted: Counted, ask: Ask) -> MemoryPart:
    """The base; if it is streamed, only the layers that are in memory at once."""
    layers = sorted((_stored(layer, ask) for layer in counted.by_layer), reverse=True)
    resident = min(ask.resident_layers or len(layers), len(layers))
    size = _stored(counted.outside, ask) + sum(layers[:resident])
    form = ask.dtype if ask.quantization == "none" else ask.quantization
    formula = f"{counted.num_parameters:,} parameters stored, in {form}, {resident} of {len(layers)} layers"
    if ask.quantization in AFFINE_BITS or ask.device != "cpu" or has_plain_loss(counted, ask):
        return MemoryPart("weights", size, formula)
    head = counted.vocab * counted.hidden
    return MemoryPart("weights", size + ask.item_bytes * head, f"{formula} + {head:,} of the head, transposed")


def _stored(layer: CountedLayer, ask: Ask) -> int:
    def matrix(out: int, in_: int) -> int:
        return packed_bytes(out, in_, ask.quantization, ask.item_bytes)

    return stored_bytes(layer, ask.item_bytes, None if ask.quantization == "none" else matrix)


def adapter(counted: Counted, ask: Ask) -> MemoryPart:
    n, keys = num_trained(counted, ask), adapted_by(counted, ask).inputs
    norms = num_scaled(counted, ask)
    formula = f"{n:,} weights × {MASTER_BYTES} B + {keys:,} dropout keys × 4 B" + f" + {norms:,} norms × 4 B" * bool(
        norms
    )
    num_start = num_kept(counted, ask)
    formula += f" + a start of {num_start:,} weights × {MASTER_BYTES} B" * bool(num_start)
    return MemoryPart("adapter", MASTER_BYTES * (n + num_start) + 4 * (keys + norms), formula)


def activations(counted: Counted, ask: Ask) -> list[MemoryPart]:
    return [_kept(counted, ask, layers, inputs) for layers, inputs in memory.kept_by_moment(counted, ask)]


def _kept(counted: Counted, ask: Ask, layers: range, inputs: int) -> MemoryPart:
    T, c = ask.cells, ask.item_bytes
    size = T * (sum(_layer(counted, ask, number) for number in layers) + inputs * c * counted.hidden)
    return MemoryPart("activations", size, f"{T:,} tokens × {len(layers)} layers and {inputs} inputs of segments")


def _layer(counted: Counted, ask: Ask, number: int) -> int:
    """Bytes that a layer keeps for a token, with its adapters."""
    layer, prefix, c = counted.by_layer[number], f"{counted.paths[number]}.", ask.item_bytes
    chosen = selected(counted, ask.targets, ask.layers, ask.experts)
    on = [linear for linear in layer.linears if linear.paths(prefix)[0] in chosen]
    read = sum({linear.reads: linear.sent * linear.in_ for linear in on}.values())
    masks = 0
    if ask.dropout:  # a mask for each input; in plain code the input and a mask for each module
        masks = 2 * sum(linear.sent * linear.in_ for linear in on) - read if ask.kernels == "reference" else read
    scaled = sum(linear.out for linear in on) * ask.scales_outputs
    saved = layer.kept[variant(c)]
    scores = saved.pair * _row(ask) + (0 if memory.is_chunked(ask) else saved.scores * memory.row_of(ask))
    of_modules = ranks(counted, ask)
    outputs = sum(linear.sent * of_modules[linear.paths(prefix)[0]] for linear in on)
    of_router = layer.experts * ask.balances_experts
    return saved.token + scores + c * (outputs + read + masks + scaled + of_router)


def _row(ask: Ask) -> int:
    return ask.cells if ask.packing else memory.row_of(ask)


def attention(counted: Counted, ask: Ask) -> MemoryPart:
    """The backward pass of a layer's attention: of documents, or of whole rows."""
    kept_by_layer = [layer.kept[variant(ask.item_bytes)] for layer in counted.by_layer]
    pair = max((saved.pair - saved.masks for saved in kept_by_layer), default=0)
    size = memory.SCORES_OF_A_ROW * ask.cells * pair * _row(ask)
    whole = MemoryPart("attention", size, f"{memory.SCORES_OF_A_ROW} × {ask.cells:,} × {_row(ask):,} scores × {pair} B")
    return max(memory.attention(counted, ask), whole, key=lambda part: part.bytes)


def feed_forward(counted: Counted, ask: Ask) -> MemoryPart:
    """The backward pass of the widest part of a layer."""
    largest = max((layer.kept[variant(ask.item_bytes)].largest for layer in counted.by_layer), default=0)
    token_bytes = 5 * largest + 8 * ask.item_bytes * counted.hidden
    return MemoryPart(
        "workspace", ask.cells * token_bytes, f"{ask.cells:,} tokens × {token_bytes:,} B of the widest part of a layer"
    )
