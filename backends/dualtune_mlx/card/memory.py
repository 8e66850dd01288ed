"""The memory that the MLX engine needs, by part.

The formulas describe this package as it is. MLX keeps what the gradients of its operations need and evaluates several
operations ahead, so the tensors that are alive at a moment are counted from measurements on its CPU build
(docs/MEMORY_OPTIMIZATION_GUIDE.md), not derived.

Legend: T tokens of the micro-batch, L of its longest document, c bytes of a number in the compute dtype, d width of the
model, q and kv widths of all query and of all key/value heads, H query heads, i width of the feed-forward block.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dualtune.engine.memory.counted import Shape
from dualtune.engine.memory.estimate import (
    AFFINE_BITS,
    MASTER_BYTES,
    Ask,
    MemoryPart,
    adapted_by,
    affine_weights,
    has_plain_loss,
    int8_weights,
    largest_update,
    libraries,
    mean_rank,
    num_kept,
    num_scaled,
    num_trained,
    optimizer,
    padded,
    trained_model,
)
from dualtune.engine.memory.shapes import Decoder
from dualtune.model.optimizer import OPTIMIZERS

# ----------------------------------------------------------------------------------------------------------------------
# Sizes for the kernels and the memory formulas. No import here: the formulas read this file without MLX.

ATTENTION_CHUNK = 512  # queries; at most this many rows of scores are kept at a time
# Logits per chunk. MLX allocates about ten operations ahead, so ten times as many are in memory. On a CPU they should
# fit in its cache; a GPU needs enough rows to pay for reading the head's weights.
LOSS_LOGITS = {"cpu": 1 << 20, "metal": 1 << 24}
UPDATE_CHUNK = 1 << 20  # weights that an optimizer with 8-bit codes updates at a time

# ----------------------------------------------------------------------------------------------------------------------
# Tensors that are alive at the moments of a step, measured.
LOGITS_OF_A_CHUNK, LOGITS_AT_MOST = 5, 10  # in float32
SCORES_OF_A_ROW, SCORES_OF_A_CHUNK = 3, 6
INT8_MATRICES = 3  # unpacked; those in 16 bits have a copy in float32
UPDATE, UPDATE_COMPILED = (5, 3.5), (3, 2.5)  # adapter-sized arrays: without slots, and per slot
# Formulas by tensor: arrays in the size of all weights, and of what is updated at a time.
BY_TENSOR = {"adafactor": (3.5, 0), "muon": (4.1, 3.5)}
# A whole model, in place: arrays in the size of what is updated at a time. Without slots, and per slot; so of 8-bit
# codes; by tensor.
IN_PLACE, IN_PLACE_CODED, IN_PLACE_BY_TENSOR = (3, 4.5), (3.75, 8), {"adafactor": 7.4, "muon": 29}
ROUNDING = 5  # and where a chunk is rounded to bfloat16
# 8-bit codes, by the number of slots: float32 arrays in the adapter's size, and in that of a chunk.
CHUNKED, CHUNKED_COMPILED = {1: (4, 9.7), 2: (4, 13)}, {1: (9.5, 0), 2: (8, 6)}
AVERAGE = 3  # and with an average: its offset, old and new, and the old weights
GELU = 4  # tensors kept by GPT-2's activation, including its input and output
# Memory beside arrays. On a Mac: Python with its libraries, Metal's kernels and command buffers. On a CPU, fitted to
# the processes of benchmarks/memory_plan.py: Python with its libraries; torch where it is installed, because mlx-lm
# imports transformers, which imports it (and for Llama, whose config asks for activations, also torch's compiler: 60 MB
# that other families do not take); something for each token (MLX keeps freed buffers). More tokens were not measured.
METAL_RESERVE = 512 << 20
LIBRARIES, OPTIONAL = 60_000_000, {"torch": 215_000_000}
OF_TOKEN, GROWING_TOKENS = 50_000, 2048


def parts(decoder: Decoder, ask: Ask) -> tuple[MemoryPart, ...]:
    """Return the parts of the peak: what is always there, what the forward pass keeps, and the largest moment."""
    trained = (trained_model(decoder, ask),) if ask.trains_model else (weights(decoder, ask), adapter(decoder, ask))
    always = (*trained, optimizer(decoder, ask))
    at_end, *later = activations(decoder, ask)
    plain = (loss(decoder, ask), attention(decoder, ask), feed_forward(decoder, ask), update(decoder, ask, at_end))
    if ask.trains_model:
        plain = (*plain, slopes(decoder, ask, at_end))
    moments = [(at_end, moment) for moment in plain]
    moments += [(recomputed, recomputation(decoder, ask)) for recomputed in later]
    most = max(moments, key=lambda moment: moment[0].bytes + moment[1].bytes)
    return (*always, *most, reserve(ask))


def reserve(ask: Ask) -> MemoryPart:
    """Return the bytes outside of arrays."""
    if ask.device == "metal":
        return MemoryPart("reserve", METAL_RESERVE, "Python, MLX and Metal")
    tokens, (size, formula) = min(ask.cells, GROWING_TOKENS), libraries(LIBRARIES, OPTIONAL, ask)
    return MemoryPart("reserve", size + OF_TOKEN * tokens, f"{formula} + {tokens} tokens × {OF_TOKEN:,} B")


def weights(decoder: Decoder, ask: Ask) -> MemoryPart:
    """The base; if it is streamed, only the layers that are in memory at once."""
    c, resident = ask.item_bytes, min(ask.resident_layers or decoder.layers, decoder.layers)
    base = _base(replace(decoder, layers=resident), ask)
    if ask.resident_layers is not None:
        base = MemoryPart("weights", base.bytes, f"{base.formula}, with {resident} of {decoder.layers} layers")
    if ask.quantization in AFFINE_BITS or ask.device != "cpu" or has_plain_loss(decoder, ask):
        return base
    head = decoder.vocab * decoder.hidden
    return MemoryPart("weights", base.bytes + c * head, f"{base.formula} + {head:,} of the head, transposed × {c} B")


def _base(decoder: Decoder, ask: Ask) -> MemoryPart:
    if ask.quantization in AFFINE_BITS:
        return affine_weights(decoder, ask)
    if ask.quantization == "int8":
        return int8_weights(decoder, ask)
    c, n = ask.item_bytes, decoder.num_parameters
    return MemoryPart("weights", c * n, f"{n:,} parameters × {c} B")


def slopes(decoder: Shape, ask: Ask, at_end: MemoryPart) -> MemoryPart:
    """The gradients of all parameters of a model at the end of the backward pass, when the activations are freed."""
    n, c = decoder.num_parameters, ask.item_bytes
    return MemoryPart("workspace", c * n - at_end.bytes, f"the gradients of {n:,} parameters × {c} B")


def adapter(decoder: Decoder, ask: Ask) -> MemoryPart:
    on = adapted_by(decoder, ask)
    n, keys, norms = num_trained(decoder, ask), on.layers * _read(decoder, ask), num_scaled(decoder, ask)
    formula = f"{n:,} weights × {MASTER_BYTES} B + {keys:,} dropout keys × 4 B" + f" + {norms:,} norms × 4 B" * bool(
        norms
    )
    num_start = num_kept(decoder, ask)
    formula += f" + a start of {num_start:,} weights × {MASTER_BYTES} B" * bool(num_start)
    return MemoryPart("adapter", MASTER_BYTES * (n + num_start) + 4 * (keys + norms), formula)


def kept_by_moment(shape: Shape, ask: Ask) -> list[tuple[range, int]]:
    """Return which layers are kept, and how many inputs of segments: at the end of the forward pass, then when each
    segment is recomputed, from the last one."""
    lowest = shape.layers - adapted_by(shape, ask).layers  # below it nothing is kept
    all_layers = range(lowest, shape.layers)
    if ask.resident_layers is not None:  # every layer is recomputed, after the loss
        return [(range(0), len(all_layers) + 1), (all_layers[-1:], len(all_layers))]
    spans = [range(max(span.start, lowest), span.stop) for span in ask.checkpointing.segments(shape.layers)]
    segments = [span for span in spans if span]
    plain = range(max([lowest, *(span.stop for span in segments)]), shape.layers)
    return [(plain, len(segments)), *reversed([*zip(segments, range(1, len(segments) + 1), strict=True)])]


def activations(decoder: Decoder, ask: Ask) -> list[MemoryPart]:
    return [_activations(decoder, ask, len(layers), inputs) for layers, inputs in kept_by_moment(decoder, ask)]


def _activations(decoder: Decoder, ask: Ask, layers: int, inputs: int) -> MemoryPart:
    T, c, d, token_bytes = ask.cells, ask.item_bytes, decoder.hidden, _kept_by_layer(decoder, ask)
    formula = f"{T:,} tokens × {layers} layers × {token_bytes:,} × {c} B"
    if inputs:
        formula += f" + {T:,} × {inputs} inputs of segments × {d:,} × {c} B"
    return MemoryPart("activations", T * c * (layers * token_bytes + inputs * d), formula)


def _kept_by_layer(decoder: Decoder, ask: Ask) -> int:
    """Return how many numbers a layer keeps for a token."""
    on, d, q = adapted_by(decoder, ask), decoder.hidden, decoder.width
    kv, i = decoder.kv_width, decoder.inner
    linears = [layer for name, layer in decoder.linears().items() if name in on.inside]
    inputs, read = [layer.in_ for layer in linears], _read(decoder, ask)
    numbers = decoder.layer_norms * d + 2 * q + 2 * kv + (q + kv) * decoder.qk_norm
    numbers += i * (GELU if decoder.is_gpt2 else 2 + 2 * decoder.gated)
    numbers += math.ceil(mean_rank(decoder, ask) * len(inputs))
    numbers += sum(layer.out for layer in linears) * ask.scales_outputs
    if (
        ask.checkpointing.adapter_inputs
    ):  # norms and gated activations keep what these inputs are made of, masks are made too
        numbers += q * ("heads" in on.reads) + i * ("inner" in on.reads and not decoder.gated)
    else:
        numbers += read
        if ask.dropout:  # a mask per input; in plain code the input and a mask per module
            numbers += 2 * sum(inputs) - read if ask.kernels == "reference" else read
    if not is_chunked(ask):
        numbers += decoder.heads * row_of(ask)  # probabilities
    return numbers


def _read(decoder: Decoder, ask: Ask) -> int:
    """Return the total width of the inputs of a layer's adapters, each counted once."""
    reads = adapted_by(decoder, ask).reads
    read = decoder.hidden * (("before attention" in reads) + ("before feed-forward" in reads))
    return read + decoder.width * ("heads" in reads) + decoder.inner * ("inner" in reads)


def row_of(ask: Ask) -> int:
    """The number of keys that are multiplied with every query."""
    return min(ask.max_length, ask.cells)


def is_chunked(ask: Ask) -> bool:
    return ask.kernels != "reference" and row_of(ask) > ATTENTION_CHUNK


def _is_compiled(ask: Ask) -> bool:
    return ask.kernels == "fused" or (ask.kernels == "auto" and ask.device != "cpu")


# --- the moments with the most additional memory ----------------------------------------------------------------------


def loss(decoder: Shape, ask: Ask) -> MemoryPart:
    c, T, V = ask.item_bytes, ask.cells, decoder.vocab
    if has_plain_loss(decoder, ask):
        return MemoryPart("loss", 14 * T * V, f"{T:,} tokens × {V:,} logits × 14 B")
    rows = min(T, max(1, LOSS_LOGITS[ask.device] // V))
    size = 4 * min(LOGITS_OF_A_CHUNK * -(-T // rows), LOGITS_AT_MOST) + (3 * c if c < MASTER_BYTES else 0)
    hidden = 8 * decoder.hidden * c
    head = MASTER_BYTES * V * decoder.hidden if ask.trains_head else 0
    formula = f"{rows:,} tokens × {V:,} logits × {size} B + {T:,} × {hidden:,} B"
    formula += f" + the head's gradient of {head:,} B" * bool(head)
    return MemoryPart("loss", size * rows * V + T * hidden + head, formula)


def attention(decoder: Shape, ask: Ask) -> MemoryPart:
    """The backward pass of a layer's attention."""
    c, H, L, T = ask.item_bytes, decoder.heads, row_of(ask), ask.cells
    if is_chunked(ask):
        whole = L // ATTENTION_CHUNK * ATTENTION_CHUNK  # queries in full chunks; a chunk sees the keys before its end
        scores = max(ATTENTION_CHUNK * whole, (L - whole) * L) * max(1, T // padded(L))
        return MemoryPart(
            "attention", SCORES_OF_A_CHUNK * H * scores * c, f"{SCORES_OF_A_CHUNK} × {H} heads × {scores:,} × {c} B"
        )
    size = SCORES_OF_A_ROW * H * T * L * c
    return MemoryPart("attention", size, f"{SCORES_OF_A_ROW} × {H} heads × {T:,} queries × {L:,} keys × {c} B")


def feed_forward(decoder: Decoder, ask: Ask) -> MemoryPart:
    """The backward pass of a layer's feed-forward block."""
    c, T = ask.item_bytes, ask.cells
    token_bytes = c * (5 * decoder.inner + 8 * decoder.hidden)
    formula = f"{T:,} tokens × {token_bytes:,} B of the feed-forward block"
    if ask.quantization != "int8":
        return MemoryPart("workspace", T * token_bytes, formula)
    unpacked = decoder.hidden * decoder.inner * (c + (4 if c < MASTER_BYTES else 0))
    formula += f" + {INT8_MATRICES} matrices of {unpacked:,} B unpacked"
    return MemoryPart("workspace", T * token_bytes + INT8_MATRICES * unpacked, formula)


def recomputation(decoder: Decoder, ask: Ask) -> MemoryPart:
    """A recomputed segment: MLX works ahead, so parts of its forward and backward pass are there together."""
    parts = attention(decoder, ask), feed_forward(decoder, ask)
    formula = " + ".join(part.formula for part in parts)
    return MemoryPart("workspace", sum(part.bytes for part in parts), f"{formula}, while layers are recomputed")


def update(decoder: Shape, ask: Ask, at_end: MemoryPart) -> MemoryPart:
    """The optimizer step, when the activations are freed."""
    n, arrays = num_trained(decoder, ask), _arrays_of_update(ask)
    alive = arrays[0] * n + arrays[1] * largest_update(decoder, ask, UPDATE_CHUNK)
    formula = (
        f"update of {n:,} weights: {alive:,.0f} × {MASTER_BYTES} B, minus the activations, which are freed by then"
    )
    return MemoryPart("workspace", int(alive * MASTER_BYTES) - at_end.bytes, formula)


def _arrays_of_update(ask: Ask) -> tuple[float, float]:
    """Return how many arrays are alive in the optimizer step: in the adapter's size, and in that of a chunk of it."""
    entry, average = OPTIMIZERS[ask.optimizer], AVERAGE * ask.averages
    slots, is_coded = len(entry.slots), entry.exact is not None
    if ask.trains_model:
        always, for_slot = IN_PLACE_CODED if is_coded else IN_PLACE
        rounding = ROUNDING * (ask.master_weights != "float32")
        return average, IN_PLACE_BY_TENSOR.get(ask.optimizer, always + for_slot * slots) + rounding
    if is_coded:
        whole, chunk = (CHUNKED_COMPILED if _is_compiled(ask) else CHUNKED)[slots]
        return whole + average, chunk
    if ask.optimizer in BY_TENSOR:
        whole, chunk = BY_TENSOR[ask.optimizer]
        return whole + average, chunk
    always, for_slot = UPDATE_COMPILED if _is_compiled(ask) else UPDATE
    return always + for_slot * (slots + ask.averages), 0
