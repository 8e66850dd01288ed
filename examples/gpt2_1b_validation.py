"""A GPT-2 of 1.02B parameters (40 layers of width 1408) trained whole within 14 GB: bfloat16, AdamW in 8 bits.

    python examples/gpt2_1b_validation.py --smoke               # a tiny GPT-2 by the same code, in seconds on a CPU
    python examples/gpt2_1b_validation.py --platform cuda       # the real size, 1000 steps

With AdamW's state in float32 the weights, the gradient and the state alone take 18 bytes a parameter, 18.4 GB, and the
run is refused before it starts.
"""

from gpt2_whole import main

SETTINGS = {
    "model.dtype": "bfloat16", "train.micro_batch_tokens": 1024, "train.learning_rate": 2e-4,
    "train.optimizer": "adamw_8bit", "memory.checkpointing": "full", "memory.limit": "14GB",
}  # fmt: skip

if __name__ == "__main__":
    main(__doc__, "1.02B", SETTINGS)
