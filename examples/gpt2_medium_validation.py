"""GPT-2 medium (355M) trained whole within 16 GB: bfloat16, and as few recomputed layers as fit.

python examples/gpt2_medium_validation.py --smoke           # a tiny GPT-2 by the same code, in seconds on a CPU
python examples/gpt2_medium_validation.py --platform cuda   # the real size, 1000 steps
"""

from gpt2_whole import main

SETTINGS = {
    "model.dtype": "bfloat16", "train.micro_batch_tokens": 4096, "train.learning_rate": 3e-4, "memory.limit": "16GB",
}  # fmt: skip

if __name__ == "__main__":
    main(__doc__, "355M", SETTINGS)
