"""GPT-2 small (124M) trained whole with everything that saves memory: compare its plan with that of the baseline.

    python examples/gpt2_memory_optimized.py --smoke            # a tiny GPT-2 by the same code, in seconds on a CPU
    python examples/gpt2_memory_optimized.py --platform cuda    # the real size, 1000 steps

bfloat16 halves the activations, four micro-batches in a step quarter them, all layers are recomputed, and the optimizer
keeps its state in 8 bits. The masters of the weights stay float32, so small updates add up.
"""

from gpt2_whole import main

SETTINGS = {
    "model.dtype": "bfloat16", "train.micro_batch_tokens": 1024, "train.learning_rate": 6e-4,
    "train.optimizer": "adamw_8bit", "memory.checkpointing": "full",
}  # fmt: skip

if __name__ == "__main__":
    main(__doc__, "124M", SETTINGS)
