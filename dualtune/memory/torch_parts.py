"""What the torch engine needs of memory, by part.

The formulas describe `backends/dualtune_torch` as it is: fused pieces, no activation checkpointing. Legend: T tokens of
the micro-batch, c bytes of a number in the compute dtype, d width of the model, q and kv widths of all query and of all
key/value heads, i width of the feed-forward block, r rank, V vocabulary.
"""

from __future__ import annotations

from dualtune.memory.ask import MASTER_BYTES, Adapted, Ask, Part, adapted
from dualtune.memory.shapes import QKV, Decoder

# bitsandbytes' NF4 with double quantization: 4-bit codes; a scale of 8 bits for 64 of them, one of 32 for 256 of these
# scales; for every matrix an offset and the two code books. Dettmers et al., QLoRA, arXiv 2305.14314.
NF4_BLOCK, NF4_BLOCKS_A_SCALE, NF4_TABLES_BYTES = 64, 256, 4 * (1 + 16 + 256)
WORTH_COMPILING = 5_000_000  # parameters, as `dualtune_torch.kernels.compiled` has it
LOSS_ROWS = {"cpu": 128, "cuda": 1024}  # target rows of a chunk, as `dualtune_torch.kernels.cross_entropy` has it
ATTENTION_BLOCK = 256  # queries, as `dualtune_torch.kernels.attention` has it
# What is no tensor. CUDA: the context with its kernels, outside the allocator, and the workspace of cuBLAS;
# CPU: the interpreter with torch, transformers and their libraries.
RESERVE_BYTES = {"cuda": 640 << 20, "cpu": 600 << 20}


def weights(decoder: Decoder, ask: Ask) -> Part:
    c = ask.item_bytes
    plain = decoder.table_parameters + decoder.vector_parameters
    if ask.quantization == "none":
        n = decoder.num_parameters
        return Part("weights", c * n, f"{n:,} parameters × {c} B")
    packed = decoder.layers * sum(nf4_bytes(out * in_) for out, in_ in decoder.linears().values())
    formula = f"{decoder.linear_parameters:,} parameters in NF4 + {plain:,} in embedding, head and norms × {c} B"
    return Part("weights", packed + c * plain, formula)


def nf4_bytes(n: int) -> int:
    """Of a matrix of n weights."""
    blocks = -(-n // NF4_BLOCK)
    return -(-n // 2) + blocks + 4 * -(-blocks // NF4_BLOCKS_A_SCALE) + NF4_TABLES_BYTES


def adapter(decoder: Decoder, ask: Ask) -> Part:
    on = adapted(decoder, ask.targets)
    n, c = ask.rank * on.num_weights, ask.item_bytes
    copy = 0 if c == MASTER_BYTES else c
    formula = f"{n:,} weights × ({MASTER_BYTES} B" + (f" + {copy} B for the copy in {ask.dtype})" if copy else ")")
    return Part("adapter", (MASTER_BYTES + copy) * n + 4 * on.inputs, f"{formula} + {on.inputs:,} dropout keys × 4 B")


def optimizer(decoder: Decoder, ask: Ask) -> Part:
    n = ask.rank * adapted(decoder, ask.targets).num_weights
    return Part("optimizer", 3 * MASTER_BYTES * n, f"gradient and two moments of {n:,} weights × {MASTER_BYTES} B")


def activations(decoder: Decoder, ask: Ask) -> Part:
    """What is kept from the forward pass for the backward pass."""
    on = adapted(decoder, ask.targets)
    T = ask.cells
    per_layer = kept_by_layer(decoder, ask, on)
    around = decoder.hidden * ask.item_bytes + 4  # the last norm
    formula = f"{T:,} tokens × ({on.layers} layers × {per_layer:,} B + {around:,} B)"
    return Part("activations", T * (on.layers * per_layer + around), formula)


def kept_by_layer(decoder: Decoder, ask: Ask, on: Adapted) -> int:
    """Bytes for each token."""
    c, d, q, kv, i = ask.item_bytes, decoder.hidden, decoder.width, decoder.kv_width, decoder.inner
    compiled = is_compiled(decoder, ask)
    norm = c if compiled else 4  # the plain norm keeps its input in float32
    kept = decoder.layer_norms * (norm * d + 4)  # its input, and one over its root mean square
    if decoder.qk_norm:
        kept += norm * (q + kv) + 4 * (decoder.heads + decoder.kv_heads)
    kept += c * d * any(name in on.names for name in QKV) + c * d * any(n in on.names for n in ("gate_proj", "up_proj"))
    kept += c * (q + 2 * kv) + c * q + 4 * decoder.heads  # q, k, v; what attention gives; its log-sum-exp
    kept += c * q * ("o_proj" in on.names and ask.dropout)
    kept += c * i * (1 + decoder.gated)
    if not compiled:
        kept += c * i * (1 + ("down_proj" in on.names))  # act(gate), and its product with up
    return kept + c * ask.rank * sum(name in on.names for name in decoder.linears())


def is_compiled(decoder: Decoder, ask: Ask) -> bool:
    return ask.kernels == "fused" or (ask.kernels == "auto" and decoder.num_parameters >= WORTH_COMPILING)


def workspace(decoder: Decoder, ask: Ask) -> Part:
    """The most that is alive besides, at one of the moments of a step, which do not coincide."""
    c, d, T = ask.item_bytes, decoder.hidden, ask.cells
    on = adapted(decoder, ask.targets)
    unpacked = 0
    if ask.quantization == "nf4":
        unpacked = c * max(out * in_ for out, in_ in decoder.linears().values())
    rows = min(LOSS_ROWS[ask.device], T)
    temporary = 0 if is_compiled(decoder, ask) else 12
    logits = rows * decoder.vocab * (c + temporary)
    moments = {
        f"loss: {T:,} × 3 × {d:,} × {c} B and {rows:,} rows of logits": 3 * T * d * c + logits,
        f"feed-forward block: {T:,} × {decoder.inner:,} × {c} B, five times": c
        * T
        * ((5 if ask.dropout and "down_proj" in on.names else 3) * decoder.inner + 2 * d)
        + unpacked,
    }
    most = max(moments, key=lambda name: moments[name])
    return Part("workspace", moments[most], most)


def parts(decoder: Decoder, ask: Ask) -> tuple[Part, ...]:
    reserve = Part("reserve", RESERVE_BYTES[ask.device], "constant")
    made = (make(decoder, ask) for make in (weights, adapter, optimizer, activations, workspace))
    return (*made, reserve)
