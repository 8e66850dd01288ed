"""The memory that the torch engine needs for a model whose shapes are counted, by part.

What a layer keeps was traced (`dualtune_torch.counting`); the largest moment of a backward pass is in proportion to its
largest tensor, as in the models that have formulas (`dualtune_torch.card.memory`).

Legend: T tokens of the micro-batch, L of its longest document, c bytes of a number in the compute dtype.
"""

from __future__ import annotations

from dualtune.engine.memory.counted import Code, Counted, CountedLayer, SavedTensors, stored_bytes, variant
from dualtune.engine.memory.estimate import (
    Ask,
    MemoryPart,
    has_plain_loss,
    optimizer,
    packed_bytes,
    ranks,
    selected,
    trained_model,
)
from dualtune_torch.card import memory
from dualtune_torch.card.memory import ATTENTION_BLOCK

SCORES = 2  # of plain attention in its backward pass: the gradients of probabilities and of scores
REARRANGED = 1.2  # of what a layer with a state keeps, where documents become rows of their own, with padding: measured
KEPT_BY_HEAD = 2  # the last norm, and the gradient of its output: in the model's width


def parts(counted: Counted, ask: Ask) -> tuple[MemoryPart, ...]:
    """Return the parts of the peak: what is always there, what the forward pass keeps, and the largest moment."""
    base = trained_model(counted, ask) if ask.trains_model else weights(counted, ask)
    own = () if ask.trains_model else (memory.adapter(counted, ask),)
    at_end = activations(counted, ask)
    moments = [memory.loss(counted, ask), workspace(counted, ask), recomputation(counted, ask, at_end.bytes)]
    if memory.has_temporaries(ask):
        moments.append(memory.update(counted, ask, at_end.bytes))
    most = max(moments, key=lambda part: part.bytes)
    return (base, *own, optimizer(counted, ask), at_end, most, memory.reserve(counted, ask, at_end.bytes + most.bytes))


# --- what is always there ---------------------------------------------------------------------------------------------


def weights(counted: Counted, ask: Ask) -> MemoryPart:
    """The base; if it is streamed, the layers that are on the device, and on a CPU, which is the host, all of them."""
    layers = [_stored(layer, ask) for layer in counted.by_layer]
    outside, resident, all_layers = _stored(counted.outside, ask), ask.resident_layers, sum(layers)
    form = ask.dtype if ask.quantization == "none" else ask.quantization
    stored = f"{counted.num_parameters:,} parameters stored, in {form}"
    if resident is None:
        return MemoryPart("weights", outside + all_layers, stored)
    on_device = resident * max(layers, default=0)
    host = all_layers if ask.device == "cpu" else 0
    return MemoryPart("weights", outside + on_device + host, f"{stored}; {resident} of {len(layers)} layers at once")


def _stored(layer: CountedLayer, ask: Ask) -> int:
    def matrix(out: int, in_: int) -> int:
        if ask.quantization == "nf4":
            return memory.nf4_bytes(out * in_)
        return packed_bytes(out, in_, ask.quantization, ask.item_bytes)

    return stored_bytes(layer, ask.item_bytes, None if ask.quantization == "none" else matrix)


# --- what the forward pass keeps --------------------------------------------------------------------------------------


def activations(counted: Counted, ask: Ask) -> MemoryPart:
    """The layers that are not recomputed, and the input of each segment that is."""
    T, c = ask.cells, ask.item_bytes
    whole, num_segments = memory.kept_layers(counted, ask), len(memory.segments(counted, ask))
    layers = sum(_layer(counted, ask, number) for number in whole)
    inputs = memory.num_inputs(ask, num_segments) * c * counted.hidden * T
    around = _bytes(counted.outside, ask, compiled=_compiled(counted, ask)) + KEPT_BY_HEAD * c * counted.hidden * T
    around += _adapters(counted, ask, "", counted.outside)
    around += 4 * T * counted.vocab * has_plain_loss(counted, ask)  # log-probabilities
    formula = f"{len(whole)} layers with {layers:,} B of {T:,} tokens + {inputs + around:,} B around them"
    return MemoryPart("activations", layers + inputs + around, formula)


def _layer(counted: Counted, ask: Ask, number: int) -> int:
    """Bytes that a layer keeps, with its adapters."""
    layer = counted.by_layer[number]
    own = _bytes(layer, ask, compiled=_compiled(counted, ask))
    of_router = ask.cells * ask.item_bytes * layer.experts * ask.balances_experts
    return own + of_router + _adapters(counted, ask, f"{counted.paths[number]}.", layer)


def _bytes(layer: CountedLayer, ask: Ask, *, compiled: bool) -> int:
    """Bytes that a layer keeps besides its adapters."""
    saved = _kept(layer, ask, compiled=compiled)
    rearranged = layer.has_state and ask.packing and ask.max_length < ask.cells
    return int((REARRANGED if rearranged else 1) * ask.cells * (saved.token + _pair(saved, ask) * _row(ask)))


def _kept(layer: CountedLayer, ask: Ask, *, compiled: bool) -> SavedTensors:
    if ask.trains_model:
        code: Code = "trained"
    elif ask.kernels == "reference":
        code = "plain"
    else:
        code = "compiled" if compiled else ""
    return layer.kept[variant(ask.item_bytes, code)]


def _pair(saved: SavedTensors, ask: Ask) -> int:
    return saved.scores if saved.scores and ask.device == "cpu" else saved.pair


def _row(ask: Ask) -> int:
    return ask.cells if ask.packing else min(ask.max_length, ask.cells)


def _compiled(counted: Counted, ask: Ask) -> bool:
    return ask.kernels != "reference" and memory.is_compiled(counted, ask)


def _adapters(counted: Counted, ask: Ask, prefix: str, layer: CountedLayer) -> int:
    """Bytes that the adapters of a layer keep: each input once, or after dropout, and what each rank makes of it."""
    if ask.trains_model:
        return 0
    chosen = selected(counted, ask.targets, ask.layers, ask.experts)
    adapted = [linear for linear in layer.linears if linear.paths(prefix)[0] in chosen]
    T, c, saved = ask.cells, ask.item_bytes, _kept(layer, ask, compiled=_compiled(counted, ask))
    of_modules = ranks(counted, ask)
    outputs = c * sum(linear.sent * of_modules[linear.paths(prefix)[0]] for linear in adapted)
    outputs += c * sum(linear.out for linear in adapted) * ask.scales_outputs
    if ask.kernels == "reference" and ask.dropout:  # the input after dropout and a mask, for each module
        return T * (outputs + (c + 1) * sum(linear.sent * linear.in_ for linear in adapted))
    inputs = {linear.reads: linear.sent * linear.in_ for linear in adapted}
    drops = memory.drops(counted, ask)
    needed = [
        in_ for reads, in_ in inputs.items() if reads not in saved.inputs or (drops and reads not in saved.recomputed)
    ]
    return T * (outputs + c * sum(needed))


# --- the moments with the most additional memory ----------------------------------------------------------------------


def workspace(counted: Counted, ask: Ask) -> MemoryPart:
    """The backward pass of the layer that needs most for it: gradients as large as its largest tensors."""
    layers = counted.by_layer or (counted.outside,)  # where transformers lists none
    sizes = [_moment(counted, ask, layer) for layer in dict.fromkeys(layers)]
    return MemoryPart(
        "workspace", max(sizes, default=0), f"{ask.cells:,} tokens × gradients of a layer's largest parts"
    )


def _moment(counted: Counted, ask: Ask, layer: CountedLayer) -> int:
    T, c = ask.cells, ask.item_bytes
    compiled = _compiled(counted, ask)
    saved = _kept(layer, ask, compiled=compiled)
    number_bytes = 3 * c
    if memory.drops(counted, ask):  # the input of an adapter again, before and after dropout
        number_bytes = 5 * c if compiled else 2 * c + 12
    matrix = max((matrices.out * matrices.in_ for matrices in layer.matrices), default=0)
    unpacked = c * matrix if ask.quantization != "none" or ask.trains_model else 0
    plain = SCORES * max(0, _pair(saved, ask) - saved.masks) * _row(ask)
    return T * (number_bytes * saved.largest // c + plain) + unpacked + _attention(counted, ask)


def _attention(counted: Counted, ask: Ask) -> int:
    """Scores of a block of queries, their probabilities and gradients: of the attention on a CPU, or in float32."""
    if not counted.fused_attention or (ask.device == "cuda" and ask.item_bytes < memory.MASTER_BYTES):
        return 0
    L, c = min(ask.max_length, ask.cells), ask.item_bytes
    block = counted.heads * min(L, ATTENTION_BLOCK) * L * (2 * c + 16)
    return max(block, memory.attention_batch(counted.heads, counted.width, 4 * memory.MASTER_BYTES, ask))


def recomputation(counted: Counted, ask: Ask, kept_bytes: int) -> MemoryPart:
    """What recomputing a segment takes above the `kept_bytes` of the forward pass: the layers after it are freed."""
    T, c = ask.cells, ask.item_bytes
    backward = workspace(counted, ask).bytes
    needed = [
        sum(_layer(counted, ask, number) for number in segment)
        + T * c * counted.hidden * (memory.num_inputs(ask, place) + 2)
        + backward
        for place, segment in enumerate(memory.segments(counted, ask), start=1)
    ]
    size = max(0, max(needed, default=0) - kept_bytes)
    return MemoryPart(
        "recomputation", size, "the layers of a segment and the backward pass of one, minus what is freed"
    )
