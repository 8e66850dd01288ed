"""What a training step of the MLX engine takes besides the products that the model's shape prescribes.

The units are those of `dualtune.engine.step_time`; each pair is (forward, backward). Counted by reading kernels/ and
lora.py: one for each primitive that MLX evaluates, after mx.compile has fused what is elementwise on Metal. Nothing
here was measured on a Mac.
"""

from __future__ import annotations

from dualtune.engine.card import PassCosts, StepCosts
from dualtune_mlx.card.memory import ATTENTION_CHUNK, LOSS_LOGITS

EXPONENTIAL, HASH = 20, 12  # elementwise operations

LAUNCHES: PassCosts = {
    "base products": {"linear": (1, 1)},
    "LoRA products": {"group": (2, 3), "adapted": (1, 2)},
    "dropout": {"group": (1, 1)},
    "scaled outputs": {"adapted": (10, 4)},
    "norms and residuals": {"layer": (4, 4)},
    "rotary": {"layer": (2, 2)},
    "activation": {"layer": (1, 1)},
    "attention": {"block": (4, 9)},
    "head and loss": {"chunk": (6, 0), "micro-batch": (4, 2)},
    "optimizer": {"step": (0, 12)},
    "rest": {"micro-batch": (8, 4)},
}
# Numbers that are read or written. Scores: written, masked and normalized, read; they are computed again for the
# backward pass only in rows longer than a chunk, which costs about as much as reading them.
NUMBERS: PassCosts = {
    "norms and residuals": {"hidden": (10, 12), "normed heads": (2, 3)},
    "rotary": {"heads": (2, 2), "kv": (2, 2)},
    "activation": {"inner": (3, 5)},
    "dropout": {"inputs": (2, 3)},
    "scaled outputs": {"outputs": (2, 5)},
    "attention": {"heads": (2, 4), "kv": (2, 4), "scores": (5, 9)},
    "head and loss": {"logits": (8, 0)},  # in float32 where they are elementwise
}
OPERATIONS: PassCosts = {
    "activation": {"inner": (EXPONENTIAL, EXPONENTIAL)},
    "dropout": {"inputs": (HASH, HASH)},
    "scaled outputs": {"outputs": (2, 4)},
    "head and loss": {"logits": (2 * EXPONENTIAL, 0)},
    "attention": {"scores": (EXPONENTIAL, 0)},
}


METAL = StepCosts(
    launches=LAUNCHES,
    numbers=NUMBERS,
    operations=OPERATIONS,
    loss_rows=lambda vocab: max(1, LOSS_LOGITS["metal"] // vocab),
    attention="rows",  # a compiled step does not know the documents
    attention_block=ATTENTION_CHUNK,
    unpacking={"int8": (1.0, 0.0, 2.0)},  # affine weights are multiplied as they are stored
)
COSTS = {"metal": METAL}  # MLX's build for CPUs multiplies by a scalar library: no limit describes it
