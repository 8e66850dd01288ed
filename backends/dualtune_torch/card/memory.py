"""The memory that the torch engine needs, by part.

The formulas assume the kernels that `model.kernels: auto` chooses on a machine with a compiler, or the plain code of
`reference`.

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
    trained_model,
)
from dualtune.engine.memory.shapes import Decoder, Linear

# ----------------------------------------------------------------------------------------------------------------------
# Sizes for the kernels and the memory formulas. No import here: the formulas read this file without torch.

# Compiling takes seconds, which do not pay off in a run with a smaller model.
WORTH_COMPILING = 5_000_000  # parameters
# Rows of a chunk of the loss, by device: few enough to save memory, enough to pay for reading the head's weights.
LOSS_ROWS = {"cpu": 128, "cuda": 1024}
ATTENTION_BLOCK = 256  # queries
# Tokens of the longest document that a CPU computes in a batch with others: with longer ones gathering costs what fewer
# calls save. A batch has at most the scores of a block.
SHORT = 128
# Weights that an optimizer of our own updates at a time, by device: on a CPU the temporaries fit in its cache.
UPDATE_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
# Triton applies the mask of dropout in registers from this many features on. dropout(x) of 2,048 tokens is then 8 MB,
# written and read in 6 µs by an H100 (3 TB/s): two launches, which is what the kernels add for each group.
FEATURES_IN_REGISTERS = 2048

# ----------------------------------------------------------------------------------------------------------------------
# bitsandbytes' NF4 with double quantization: 4-bit codes; a scale of 8 bits for 64 of them, one of 32 for 256 of these
# scales; for every matrix an offset and the two code books. Dettmers et al., QLoRA, arXiv 2305.14314.
NF4_BLOCK, NF4_BLOCKS_A_SCALE, NF4_TABLES_BYTES = 64, 256, 4 * (1 + 16 + 256)
# Of the size of what is updated at a time in float32: measured.
CHUNK_ARRAYS = {"adamw_8bit": 7.26, "schedule_free": 4, "lion": 5, "lion_8bit": 6.25, "adafactor": 8.13, "muon": 8.25}
ROUNDING_ARRAYS = 7  # and where it is rounded to bfloat16, with the part that is in float32
GELU = 4  # tensors kept by GPT-2's activation, elementwise in transformers: its input, half of it, tanh, 1 + tanh
OFFLOADED_AT_ONCE = 2  # inputs of segments on the device: the one that is used, and the next one on its way
# Memory outside of tensors. On CUDA the context with its kernels, which the allocator does not count, and cuBLAS'
# workspace. On a CPU, fitted to the processes of benchmarks/memory_plan.py: Python with torch and transformers, and
# Triton, which torch imports where it is installed; a share of the peak, which the C library keeps in blocks that
# nothing fits in; with compiled code the compiler, and something for each of the first tokens whose cause is not known.
# With int8, an output head in float32 comes on top.
CUDA_RESERVE = 640 << 20
LIBRARIES, OPTIONAL, KEPT_SHARE = 325_000_000, {"triton": 30_000_000}, 0.42
COMPILER, OF_TOKEN, GROWING_TOKENS = 20_000_000, 150_000, 512


def parts(decoder: Decoder, ask: Ask) -> tuple[MemoryPart, ...]:
    """Return the parts of the peak: what is always there, what the forward pass keeps, and the largest moment."""
    trained = (trained_model(decoder, ask),) if ask.trains_model else (weights(decoder, ask), adapter(decoder, ask))
    always = (*trained, optimizer(decoder, ask))
    at_end = activations(decoder, ask)
    moments = [loss(decoder, ask), recomputation(decoder, ask, at_end.bytes)]
    if kept_layers(decoder, ask):
        moments += [attention(decoder, ask), feed_forward(decoder, ask)]
    if has_temporaries(ask):
        moments.append(update(decoder, ask, at_end.bytes))
    most = max(moments, key=lambda part: part.bytes)
    return (*always, at_end, most, reserve(decoder, ask, at_end.bytes + most.bytes))


def weights(decoder: Decoder, ask: Ask) -> MemoryPart:
    """Return the bytes of the base on the device; on a CPU, which is also the host, of both copies."""
    if ask.resident_layers is None:
        return whole_base(decoder, ask)
    base, N = whole_base(decoder, ask), ask.resident_layers
    layer = layer_bytes(decoder, ask)
    outside = base.bytes if ask.device == "cpu" else base.bytes - decoder.layers * layer
    where = f"{N} of {decoder.layers} layers × {layer:,} B on the device, all of them in host memory"
    return MemoryPart("weights", outside + N * layer, f"{base.formula}; {where}")


def layer_bytes(decoder: Decoder, ask: Ask) -> int:
    """Return the bytes of a layer that is streamed: norms, biases and the tables of NF4 stay on the device."""
    fewer = replace(decoder, layers=decoder.layers - 1)
    stays = ask.item_bytes * (decoder.vector_parameters - fewer.vector_parameters)
    stays += len(decoder.linears()) * NF4_TABLES_BYTES * (ask.quantization == "nf4")
    return whole_base(decoder, ask).bytes - whole_base(fewer, ask).bytes - stays


def whole_base(decoder: Decoder, ask: Ask) -> MemoryPart:
    c, n = ask.item_bytes, decoder.num_parameters
    if ask.quantization == "none":
        return MemoryPart("weights", c * n, f"{n:,} parameters × {c} B")
    if ask.quantization in AFFINE_BITS:
        return affine_weights(decoder, ask)
    if ask.quantization == "int8":
        return int8_weights(decoder, ask)
    plain = decoder.table_parameters + decoder.vector_parameters
    packed = decoder.layers * sum(nf4_bytes(layer.out * layer.in_) for layer in decoder.linears().values())
    formula = f"{n - plain:,} parameters in NF4, {plain:,} in embedding, head and norms × {c} B"
    return MemoryPart("weights", packed + c * plain, formula)


def _copy_bytes(ask: Ask) -> int:
    """Bytes of a trained number in the copy that is computed with, if there is one."""
    return 0 if ask.item_bytes == MASTER_BYTES else ask.item_bytes


def nf4_bytes(n: int) -> int:
    """Bytes of a matrix of n weights."""
    blocks = -(-n // NF4_BLOCK)
    return -(-n // 2) + blocks + 4 * -(-blocks // NF4_BLOCKS_A_SCALE) + NF4_TABLES_BYTES


def adapter(decoder: Shape, ask: Ask) -> MemoryPart:
    on, n, kept, copy = adapted_by(decoder, ask), num_trained(decoder, ask), num_kept(decoder, ask), _copy_bytes(ask)
    in_copy = f" + {copy} B in {ask.dtype}" if copy else ""
    formula = f"{n:,} weights × ({MASTER_BYTES} B{in_copy}) + {on.inputs:,} dropout keys × 4 B"
    norms = num_scaled(decoder, ask)
    formula += f" + {norms:,} norms of W and of the sum × 8 B" * bool(norms)
    size = (MASTER_BYTES + copy) * n + 4 * on.inputs + 8 * norms
    if kept:  # both are computed with side by side, also in float32
        of_both = (ask.item_bytes - copy) * n + ask.item_bytes * kept
        formula += f" + a start of {kept:,} weights × {MASTER_BYTES} B + {of_both:,} B of copies"
        size += MASTER_BYTES * kept + of_both
    return MemoryPart("adapter", size, formula)


def reserve(decoder: Shape, ask: Ask, peak: int) -> MemoryPart:
    """Return the bytes outside of tensors, in a step with a `peak` of tensors beyond those that are always there."""
    if ask.device == "cuda":
        return MemoryPart("reserve", CUDA_RESERVE, "CUDA context and cuBLAS")
    size, formula = libraries(LIBRARIES, OPTIONAL, ask)
    size, formula = size + int(KEPT_SHARE * peak), f"{formula} + {KEPT_SHARE} × {peak:,} B, kept by the C library"
    if ask.quantization == "int8":
        head = decoder.vocab * decoder.hidden * MASTER_BYTES
        size, formula = size + head, f"{formula} + {head:,} B with int8"
    if not is_compiled(decoder, ask):
        return MemoryPart("reserve", size, formula)
    tokens = min(ask.cells, GROWING_TOKENS)
    size += COMPILER + OF_TOKEN * tokens
    return MemoryPart("reserve", size, f"{formula} + {COMPILER:,} B of the compiler + {tokens} tokens × {OF_TOKEN:,} B")


# --- what the forward pass keeps for the backward pass ----------------------------------------------------------------


def activations(decoder: Decoder, ask: Ask) -> MemoryPart:
    """The layers that are not recomputed, and the input of each segment that is."""
    on, c, d, T = adapted_by(decoder, ask), ask.item_bytes, decoder.hidden, ask.cells
    layer, whole = _layer(decoder, ask), len(kept_layers(decoder, ask))
    inputs = num_inputs(ask, len(segments(decoder, ask)))
    # The last norm, the gradient of its output or the log-probabilities, minus the first norm, below which is no
    # adapter: it keeps nothing, so what reads its output cannot recompute it.
    around = 2 * c * d + _angles(decoder, ask) + 4 * decoder.vocab * has_plain_loss(decoder, ask)
    if ask.trains_model:
        around += _normalized(decoder, ask) * c * d
    elif whole == on.layers:
        around -= c * d * (not (_norms_are_recomputed(decoder, ask) and "before attention" in on.reads))
    copies = 0
    if ask.kernels == "reference" and c < MASTER_BYTES:  # of the adapter, in the compute dtype
        copies = num_trained(decoder, ask) * c * whole // max(on.layers, 1)
    size = T * (whole * layer + inputs * c * d + around) + copies
    of_segments = f" + {inputs} inputs × {c * d:,} B" * bool(inputs)
    formula = f"{T:,} tokens × ({whole} layers × {layer:,} B{of_segments} + {around:,} B)"
    return MemoryPart("activations", size, formula)


def segments(decoder: Shape, ask: Ask) -> list[range]:
    """The segments of layers that are recomputed: below the lowest adapter nothing is."""
    lowest = decoder.layers - adapted_by(decoder, ask).layers
    return [segment for segment in ask.checkpointing.segments(decoder.layers) if segment.stop > lowest]


def num_inputs(ask: Ask, num_segments: int) -> int:
    """The number of inputs of these segments that are on the device at a time."""
    return min(num_segments, OFFLOADED_AT_ONCE) if ask.checkpointing.offload else num_segments


def kept_layers(decoder: Shape, ask: Ask) -> range:
    """The layers that are kept, from the lowest adapted one."""
    lowest = decoder.layers - adapted_by(decoder, ask).layers
    return range(max([lowest, *(segment.stop for segment in segments(decoder, ask))]), decoder.layers)


def _layer(decoder: Decoder, ask: Ask) -> int:
    """Bytes per token of a layer that is kept."""
    layer = _plain_layer(decoder, ask) if ask.kernels == "reference" else _fused_layer(decoder, ask)
    return layer + ask.item_bytes * sum(linear.out for linear in _inside(decoder, ask)) * ask.scales_outputs


def _inside(decoder: Decoder, ask: Ask) -> list[Linear]:
    """The adapted linear layers of a layer."""
    inside = adapted_by(decoder, ask).inside
    return [linear for name, linear in decoder.linears().items() if name in inside]


def _dropped_alone(decoder: Decoder, ask: Ask) -> int:
    """Bytes per token where each adapter has an input of its own: after dropout, and a mask."""
    return (ask.item_bytes + 1) * sum(linear.in_ for linear in _inside(decoder, ask))


def _angles(decoder: Decoder, ask: Ask) -> int:
    return 0 if decoder.is_gpt2 else 2 * decoder.head_dim * ask.item_bytes


def _norms_are_recomputed(decoder: Decoder, ask: Ask) -> bool:
    """Whether adapters recompute the output of a norm: it must keep its input in the compute dtype."""
    keeps_input = decoder.is_gpt2 or is_compiled(decoder, ask) or ask.item_bytes == MASTER_BYTES
    return ask.checkpointing.adapter_inputs and ask.kernels != "reference" and keeps_input


def _fused_layer(decoder: Decoder, ask: Ask) -> int:
    """Bytes per token of the fused kernels: what every product and every norm needs, once."""
    reads, c = adapted_by(decoder, ask).reads, ask.item_bytes
    d, q, kv, i = decoder.hidden, decoder.width, decoder.kv_width, decoder.inner
    token_bytes = _norms(decoder, ask, is_compiled=is_compiled(decoder, ask))
    if not _norms_are_recomputed(decoder, ask):
        token_bytes += (
            c * d * (("before attention" in reads) + ("before feed-forward" in reads))
        )  # their input, dropped
    token_bytes += c * (q + 2 * kv) + c * q + 4 * decoder.heads  # q, k, v; the output of attention, its log-sum-exp
    token_bytes += c * q * ("heads" in reads and drops(decoder, ask) and not ask.checkpointing.adapter_inputs)
    if decoder.is_gpt2:
        token_bytes += c * i * (GELU + ("inner" in reads))
    else:
        token_bytes += c * i * (1 + decoder.gated)  # gate and up
        if not is_compiled(decoder, ask):
            token_bytes += (
                c * i * (1 + ("inner" in reads))
            )  # act(gate), and the product; compiled code recomputes both…
        elif ask.trains_model:
            token_bytes += c * i  # …but not for a layer whose weight has a gradient
    return token_bytes + _ranks(decoder, ask)


def _ranks(decoder: Decoder, ask: Ask) -> int:
    """Bytes per token of what the adapters of a layer make of their inputs, A x."""
    return math.ceil(ask.item_bytes * mean_rank(decoder, ask) * len(adapted_by(decoder, ask).inside))


def _plain_layer(decoder: Decoder, ask: Ask) -> int:
    """Bytes per token of transformers' own code and plain LoRA: an input after dropout and a mask for every module."""
    on, c = adapted_by(decoder, ask), ask.item_bytes
    d, q, kv, i = decoder.hidden, decoder.width, decoder.kv_width, decoder.inner
    token_bytes = _norms(decoder, ask, is_compiled=False) + _ranks(decoder, ask)
    token_bytes += c * 2 * q + 4 * decoder.heads
    # Packed rows need a mask, and with a mask keys and values are repeated for every head.
    token_bytes += c * (2 * q + ask.cells) if ask.packing else c * 2 * kv
    token_bytes += c * i * (GELU if decoder.is_gpt2 else 1 + 2 * decoder.gated)  # gate, act(gate) and up
    if ask.dropout:
        return token_bytes + _dropped_alone(decoder, ask)
    token_bytes += c * d * (("before attention" in on.reads) + ("before feed-forward" in on.reads))
    return token_bytes + c * i * ("inner" in on.reads)


def _norms(decoder: Decoder, ask: Ask, *, is_compiled: bool) -> int:
    """The input of every norm, which the plain RMS norm keeps in float32, and 1 / its root mean square.

    GPT-2's norm keeps its input unchanged, and also a mean.
    """
    if decoder.is_gpt2:
        return decoder.layer_norms * (ask.item_bytes * decoder.hidden + 8)
    item_bytes = ask.item_bytes if is_compiled else 4
    heads = (decoder.heads + decoder.kv_heads) * decoder.qk_norm
    wide = decoder.layer_norms * decoder.hidden + heads * decoder.head_dim
    of_weights = ask.item_bytes * wide * _normalized(decoder, ask)
    return item_bytes * wide + of_weights + 4 * (decoder.layer_norms + heads)


def _normalized(decoder: Decoder, ask: Ask) -> bool:
    """Whether an RMS norm keeps what its weight is multiplied by: for the gradient of the weight, in the plain code."""
    return ask.trains_model and not decoder.is_gpt2 and (ask.kernels == "reference" or not is_compiled(decoder, ask))


def drops(decoder: Shape, ask: Ask) -> bool:
    """Whether inputs after dropout are in memory: Triton's kernels apply the mask as they read the input."""
    narrowest = min((in_ for _, in_ in adapted_by(decoder, ask).shapes), default=0)
    in_registers = ask.device == "cuda" and ask.item_bytes < MASTER_BYTES and narrowest >= FEATURES_IN_REGISTERS
    return ask.dropout and not (in_registers and ask.kernels != "reference")


def is_compiled(decoder: Shape, ask: Ask) -> bool:
    return ask.kernels == "fused" or (ask.kernels in ("auto", "graph") and decoder.num_parameters >= WORTH_COMPILING)


# --- the moments with the most additional memory ----------------------------------------------------------------------


def loss(decoder: Shape, ask: Ask) -> MemoryPart:
    """A chunk of logits, and its gradient. Plain: the logits of all tokens, in float32, and their gradient.

    Compiled code for a GPU writes the gradient over the logits.
    """
    c, T, V = ask.item_bytes, ask.cells, decoder.vocab
    if has_plain_loss(decoder, ask):
        return MemoryPart("loss", 8 * T * V, f"{T:,} tokens × {V:,} logits × 2 × 4 B")
    rows = min(LOSS_ROWS[ask.device], T)
    # The plain code has two temporaries in float32, and a copy from which they are computed.
    compiled = c if ask.device == "cuda" else 2 * c
    number_bytes = compiled if is_compiled(decoder, ask) else c + (12 if c < MASTER_BYTES else 8)
    unpacked = c * V * decoder.hidden if ask.quantization in AFFINE_BITS else 0
    head = MASTER_BYTES * V * decoder.hidden if ask.trains_model or ask.trains_head else 0
    chunk = rows * V * number_bytes
    if head:  # its part of the gradient, in the compute dtype, when the temporaries are freed
        chunk = max(chunk, rows * V * c + V * decoder.hidden * _copy_bytes(ask))
    size = chunk + 2 * T * decoder.hidden * c + unpacked + head
    formula = f"{rows:,} tokens × {V:,} logits × {number_bytes} B + 2 × {T:,} × {decoder.hidden:,} × {c} B"
    formula += f" + a head of {unpacked:,} B unpacked" * bool(unpacked)
    return MemoryPart("loss", size, formula + f" + the head's gradient of {head:,} B" * bool(head))


def recomputation(decoder: Decoder, ask: Ask, kept_bytes: int) -> MemoryPart:
    """What recomputing a segment takes above the `kept_bytes` of the forward pass: the layers after it are freed."""
    c, d, T, layer = ask.item_bytes, decoder.hidden, ask.cells, _layer(decoder, ask)
    backward = max(attention(decoder, ask).bytes, feed_forward(decoder, ask).bytes)
    # The inputs so far, the output of the segment, and its gradient.
    needed = [
        T * (len(segment) * layer + (num_inputs(ask, number) + 2) * c * d + _angles(decoder, ask)) + backward
        for number, segment in enumerate(segments(decoder, ask), start=1)
    ]
    size = max(0, max(needed, default=0) - kept_bytes)
    return MemoryPart("recomputation", size, f"layers × {layer:,} B and the backward pass of one, minus what is freed")


def attention(decoder: Decoder, ask: Ask) -> MemoryPart:
    """The backward pass of a layer's attention."""
    c, T, q, kv, H = ask.item_bytes, ask.cells, decoder.width, decoder.kv_width, decoder.heads
    if ask.kernels == "reference" or (ask.device == "cuda" and c < MASTER_BYTES):
        # FlashAttention: the gradient of q in float32 and then in c bytes, those of k and v for every query head.
        number_bytes = 4 * q + 4 * H + c * (3 * q + 2 * kv)
        return MemoryPart("attention", T * number_bytes, f"{T:,} tokens × {number_bytes:,} B of gradients")
    L = min(ask.max_length, T)
    block = min(L, ATTENTION_BLOCK)
    number_bytes = 4 * c if is_compiled(decoder, ask) else 2 * c + 16  # scores, probabilities and their gradients
    before = L - block or (L if T >= 2 * L else 0)  # of this document or another one
    size = H * block * (number_bytes * L + 2 * c * before)  # two are still alive
    formula = f"{H} heads × {block} queries × {L:,} keys × {number_bytes} B, and the block before"
    if (batch := attention_batch(H, q, number_bytes, ask)) > size:
        size, formula = batch, f"{H} heads and a batch of short documents: {batch:,} B"
    freed = c * decoder.inner * (1 + decoder.gated) * T  # of the layer's feed-forward block, which is done by then
    return MemoryPart("attention", size - freed, f"{formula}, less {freed:,} B of the feed-forward block")


def attention_batch(heads: int, width: int, number_bytes: int, ask: Ask) -> int:
    """Bytes of the backward pass of a batch of short documents, which a CPU computes at once."""
    if ask.device != "cpu":
        return 0
    scores = min(ATTENTION_BLOCK**2, ask.cells * min(ask.max_length, SHORT))
    return heads * scores * number_bytes + 4 * ask.item_bytes * ask.cells * width  # q, k, v and a gradient, gathered


def feed_forward(decoder: Decoder, ask: Ask) -> MemoryPart:
    """The backward pass of a layer's down_proj, or of the code between it and its neighbours."""
    c, T, i = ask.item_bytes, ask.cells, decoder.inner
    is_dropped = drops(decoder, ask) and "inner" in adapted_by(decoder, ask).reads
    number_bytes = 3 * c
    if is_dropped:  # the input again, before and after dropout; three gradients. Plain: two, and three integers (hash)
        number_bytes = 5 * c if is_compiled(decoder, ask) else 2 * c + 12
    if decoder.is_gpt2 and is_compiled(decoder, ask) and "inner" in adapted_by(decoder, ask).reads:
        number_bytes -= (2 if is_dropped else 1) * c  # without a gate there are fewer gradients: measured
    matrix = c * decoder.hidden * i if ask.quantization != "none" or ask.trains_model else 0
    content = "gradient" if ask.trains_model else "unpacked"
    formula = f"{T:,} tokens × {i:,} × {number_bytes} B" + (
        f" + a matrix of {matrix:,} B ({content})" if matrix else ""
    )
    return MemoryPart("workspace", T * i * number_bytes + matrix, formula)


def has_temporaries(ask: Ask) -> bool:
    """Whether an update has some. Torch's own optimizers have none."""
    return ask.averages or ask.optimizer in CHUNK_ARRAYS or ask.master_weights != "float32"


def update(decoder: Shape, ask: Ask, kept_bytes: int) -> MemoryPart:
    """The step of an optimizer of our own, or with an average, when what the forward pass has `kept_bytes` is freed."""
    n = num_trained(decoder, ask)
    of_chunk = CHUNK_ARRAYS.get(ask.optimizer, 0) + ROUNDING_ARRAYS * (ask.master_weights != "float32")
    arrays = of_chunk * largest_update(decoder, ask, UPDATE_CHUNK[ask.device])
    size, before = math.ceil(arrays * MASTER_BYTES), MASTER_BYTES * n * ask.averages
    parts = [f"update in chunks of {size:,} B"] * (size > 0) + [f"the weights before it, {before:,} B"] * (before > 0)
    formula = f"{' + '.join(parts)}, minus the activations, freed by then"
    return MemoryPart("workspace", size + before - kept_bytes, formula)
