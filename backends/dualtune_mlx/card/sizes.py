"""Sizes for the kernels and the memory formulas. No import here: the formulas read this file without MLX."""

ATTENTION_CHUNK = 512  # queries; at most this many rows of scores are kept at a time
# Logits per chunk. MLX allocates about ten operations ahead, so ten times as many are in memory. On a CPU they should
# fit in its cache; a GPU needs enough rows to pay for reading the head's weights.
LOSS_LOGITS = {"cpu": 1 << 20, "metal": 1 << 24}
UPDATE_CHUNK = 1 << 20  # weights that adamw_8bit updates at a time
