"""What the MLX engine needs of memory, by part.

The formulas describe `backends/dualtune_mlx` as it is. Legend: as in `torch_parts`.
"""

from __future__ import annotations

from dualtune.memory.ask import MASTER_BYTES, Ask, Part, adapted
from dualtune.memory.shapes import QKV, Decoder

GROUP = 64  # weights that share a scale and a bias
BITS = {"affine4": 4, "affine8": 8}
CHUNK = 512  # queries, as `dualtune_mlx.kernels.attention` has it
LOGITS = {"cpu": 1 << 20, "metal": 1 << 24}  # of a chunk of the loss, as `dualtune_mlx.kernels.cross_entropy` has it
LOGITS_HELD = 10  # times as many are held, as that module says
RESERVE_BYTES = {"metal": 512 << 20, "cpu": 400 << 20}


def weights(decoder: Decoder, ask: Ask) -> Part:
    c, bits = ask.item_bytes, BITS.get(ask.quantization)
    n = decoder.num_parameters
    if bits is None:
        copy = decoder.vocab * decoder.hidden if ask.device == "cpu" else 0  # of the head, transposed
        return Part("weights", c * (n + copy), f"{n + copy:,} parameters × {c} B")
    matrices = [*decoder.linears().values()] * decoder.layers
    matrices += [(decoder.vocab, decoder.hidden)] * (1 if decoder.tied else 2)
    packed = sum(affine_bytes(out, in_, bits, c) for out, in_ in matrices)
    formula = f"{n - decoder.vector_parameters:,} parameters in {bits} bits, a scale and a bias for each {GROUP}"
    return Part("weights", packed + c * decoder.vector_parameters, f"{formula}, of {c} B")


def affine_bytes(out: int, in_: int, bits: int, c: int) -> int:
    """Of a matrix; mlx-lm leaves those plain whose rows are no multiple of a group."""
    n = out * in_
    return c * n if in_ % GROUP else n * bits // 8 + 2 * c * n // GROUP


def adapter(decoder: Decoder, ask: Ask) -> Part:
    n = ask.rank * adapted(decoder, ask.targets).num_weights
    return Part("adapter", MASTER_BYTES * n, f"{n:,} weights × {MASTER_BYTES} B")


def optimizer(decoder: Decoder, ask: Ask) -> Part:
    n = ask.rank * adapted(decoder, ask.targets).num_weights
    return Part("optimizer", 3 * MASTER_BYTES * n, f"gradient and two moments of {n:,} weights × {MASTER_BYTES} B")


def activations(decoder: Decoder, ask: Ask) -> Part:
    on, T = adapted(decoder, ask.targets), ask.cells
    c, d, q, kv, i = ask.item_bytes, decoder.hidden, decoder.width, decoder.kv_width, decoder.inner
    kept = decoder.layer_norms * d + (q + kv if decoder.qk_norm else 0)
    kept += d * any(name in on.names for name in QKV) + d * any(name in on.names for name in ("gate_proj", "up_proj"))
    kept += (q + 2 * kv) + q + q * ("o_proj" in on.names and ask.dropout)
    kept += 2 * i + i + i * ("down_proj" in on.names)
    kept += 2 * ask.rank * sum(name in on.names for name in decoder.linears())
    formula = f"{T:,} tokens × {on.layers} layers × {kept:,} × {c} B"
    return Part("activations", T * on.layers * kept * c, formula)


def attention(decoder: Decoder, ask: Ask) -> Part:
    """Scores: kept where a document is no longer than a chunk, of one chunk otherwise."""
    c, on = ask.item_bytes, adapted(decoder, ask.targets)
    if ask.max_length <= CHUNK:
        size = ask.cells * ask.max_length * decoder.heads * c * on.layers
        return Part(
            "attention",
            size,
            f"{ask.cells:,} × {ask.max_length:,} × {decoder.heads} heads × {on.layers} layers × {c} B",
        )
    size = 3 * CHUNK * ask.max_length * decoder.heads * c
    return Part("attention", size, f"3 × {CHUNK} × {ask.max_length:,} × {decoder.heads} heads × {c} B")


def workspace(decoder: Decoder, ask: Ask) -> Part:
    c, d, T = ask.item_bytes, decoder.hidden, ask.cells
    loss = 3 * T * d * c + 4 * LOGITS_HELD * max(LOGITS[ask.device], decoder.vocab)
    block = c * T * (5 * decoder.inner + 2 * d)
    if loss >= block:
        return Part("workspace", loss, "loss")
    return Part("workspace", block, "feed-forward block")


def parts(decoder: Decoder, ask: Ask) -> tuple[Part, ...]:
    reserve = Part("reserve", RESERVE_BYTES[ask.device], "constant")
    made = (make(decoder, ask) for make in (weights, adapter, optimizer, activations, attention, workspace))
    return (*made, reserve)
