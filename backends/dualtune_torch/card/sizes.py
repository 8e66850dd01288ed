"""Sizes for the kernels and the memory formulas. No import here: the formulas read this file without torch."""

# Compiling takes seconds, which do not pay off in a run with a smaller model.
WORTH_COMPILING = 5_000_000  # parameters
# Rows of a chunk of the loss, by device: few enough to save memory, enough to pay for reading the head's weights.
LOSS_ROWS = {"cpu": 128, "cuda": 1024}
ATTENTION_BLOCK = 256  # queries
# Weights that adamw_8bit updates at a time, by device: on a CPU the temporaries fit in its cache.
UPDATE_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
