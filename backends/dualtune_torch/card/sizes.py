"""Sizes for the kernels and the memory formulas. No import here: the formulas read this file without torch."""

# Compiling takes seconds, which do not pay off in a run with a smaller model.
WORTH_COMPILING = 5_000_000  # parameters
# Rows of a chunk of the loss, by device: few enough to save memory, enough to pay for reading the head's weights.
LOSS_ROWS = {"cpu": 128, "cuda": 1024}
ATTENTION_BLOCK = 256  # queries
# Weights that adamw_8bit updates at a time, by device: on a CPU the temporaries fit in its cache.
UPDATE_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
# Triton applies the mask of dropout in registers from this many features on. dropout(x) of 2,048 tokens is then 8 MB,
# written and read in 6 µs by an H100 (3 TB/s): two launches, which is what the kernels add for each group.
FEATURES_IN_REGISTERS = 2048
