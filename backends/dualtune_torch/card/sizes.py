"""Sizes that the kernels use and the memory formulas count with. No import: both read them, one without torch."""

# The compiler takes seconds, and a run with a model below this is over before they pay.
WORTH_COMPILING = 5_000_000  # parameters
# Rows of a chunk of the loss, by device: few enough for memory, enough to use the head's weights well once they are
# read.
LOSS_ROWS = {"cpu": 128, "cuda": 1024}
ATTENTION_BLOCK = 256  # queries
