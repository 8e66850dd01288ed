"""GPT-2 small (124M) trained whole in float32 with AdamW, 8 rows of 512 tokens at once, below 5 GB.

    python examples/gpt2_small_baseline.py --smoke              # a tiny GPT-2 by the same code, in seconds on a CPU
    python examples/gpt2_small_baseline.py --platform cuda      # the real size, 1000 steps

Nothing saves memory here but what costs nothing: attention and loss never hold a whole matrix of scores or logits. What
does not fit in the limit is recomputed, as few layers as possible.
"""

from gpt2_whole import main

SETTINGS = {
    "model.dtype": "float32", "train.micro_batch_tokens": 4096, "train.learning_rate": 6e-4, "memory.limit": "5GB",
}  # fmt: skip

if __name__ == "__main__":
    main(__doc__, "124M", SETTINGS)
