"""What a training step of the torch engine takes besides the products that the model's shape prescribes.

The units are those of `dualtune.engine.step_time`; each pair is (forward, backward). Launches were counted on the
engine (tests/performance/test_work.py, tests/nogpu/test_predicted_launches.py), numbers follow from the code of
kernels/. The host waits for nothing in a micro-batch (tests/nogpu/test_fake_steps.py). Kernels that are chosen by a
trial on the GPU itself are not in it: dropout in registers, one pass over g.
"""

from __future__ import annotations

from dualtune.engine.card import PassCosts, StepCosts
from dualtune_torch.card.memory import ATTENTION_BLOCK, LOSS_ROWS, SHORT, WORTH_COMPILING

# Elementwise operations. A 32-bit integer product takes several; positions are compared as 64-bit integers.
EXPONENTIAL, HASH, MASK = 20, 24, 40

# Operator calls: kernels/lora.py, attention.py, blocks.py, cross_entropy.py. Each compiled function is one call.
LAUNCHES: PassCosts = {
    "base products": {"linear": (1, 1)},
    "LoRA products": {"group": (1, 2), "adapted": (1, 2)},
    "dropout": {"group": (1, 1), "inner group": (0, 1)},
    "scaled outputs": {"adapted": (3, 5), "adapted in a step": (13, 0)},  # in 16 bits 1, 1 and 2 more: copies
    "norms and residuals": {"layer": (4, 4)},
    "rotary": {"layer": (2, 4)},
    "activation": {"layer": (1, 2)},
    "head and loss": {"chunk": (6, 0), "micro-batch": (6, 2)},
    "optimizer": {"step": (0, 26)},
    "rest": {"micro-batch": (11, 4)},
}
ATTENTION_LAUNCHES: dict[str, PassCosts] = {
    "cpu": {"attention": {"layer": (1, 6), "document": (5, 0), "block": (0, 13), "batch": (8, 28)}},
    "cuda": {"attention": {"layer": (1, 3)}},  # FlashAttention's backward pass is three kernels
}
# Numbers that are read or written.
NUMBERS: PassCosts = {
    "norms and residuals": {"hidden": (10, 12), "normed heads": (2, 3)},  # a norm 2 and 3, an addition 3, twice
    "rotary": {"heads": (2, 2), "kv": (2, 2)},
    "activation": {"inner": (3, 3 + 5)},  # computed again in the backward pass
    "dropout": {"inputs": (2, 3), "inner inputs": (0, 2)},
    "scaled outputs": {"outputs": (2, 6)},  # z, and its gradient twice: for the scale, and scaled
}
NUMBERS_OF: dict[str, PassCosts] = {
    # Forward: keys and values repeated, the output copied. Backward: zeros, sums; scores, probabilities, gradients.
    # Logits: written; read for maximum, sum and gradient, which is written, copied over them and read.
    "cpu": {"attention": {"heads": (10, 9), "kv": (2, 8), "scores": (0, 11)}, "head and loss": {"logits": (8, 0)}},
    # Logits: written, read twice and replaced by their gradient, which is read.
    "cuda": {"attention": {"heads": (2, 8), "kv": (2, 6)}, "head and loss": {"logits": (5, 0)}},
}
OPERATIONS: PassCosts = {
    "activation": {"inner": (EXPONENTIAL, 3 * EXPONENTIAL)},  # again, and its gradient
    "dropout": {"inputs": (HASH, HASH), "inner inputs": (0, HASH)},
    "scaled outputs": {"outputs": (2, 4)},
    "head and loss": {"logits": (2 * EXPONENTIAL, 0)},
    "attention": {"scores": (EXPONENTIAL, EXPONENTIAL + MASK)},
}
# Quantization -> (operator calls for a matrix; numbers moved and operations for each weight, besides reading the stored
# weight and writing the result). On a CPU plain operators unpack affine formats, one after another; on a GPU a Triton
# kernel unpacks a matrix of NF4 or an affine format.
UNPACKING: dict[str, dict[str, tuple[float, float, float]]] = {
    "cpu": {"nf4": (3.0, 0.0, 40.0), "int8": (1.0, 0.0, 2.0), "affine4": (7.0, 6.0, 4.0), "affine8": (3.0, 4.0, 2.0)},
    "cuda": {"nf4": (1.0, 0.0, 2.0), "int8": (1.0, 0.0, 2.0), "affine4": (1.0, 0.0, 4.0), "affine8": (1.0, 0.0, 2.0)},
}


def _costs(kind: str) -> StepCosts:
    return StepCosts(
        launches={**LAUNCHES, **ATTENTION_LAUNCHES[kind]},
        numbers={**NUMBERS, **NUMBERS_OF[kind]},
        operations=OPERATIONS,
        loss_rows=lambda vocab: LOSS_ROWS[kind],
        attention="flash" if kind == "cuda" else "documents",
        attention_block=ATTENTION_BLOCK,
        attention_short=0 if kind == "cuda" else SHORT,
        least_parameters=WORTH_COMPILING,
        unpacking=UNPACKING[kind],
    )


COSTS = {kind: _costs(kind) for kind in ("cpu", "cuda")}
