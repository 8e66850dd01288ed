"""Sizes that the kernels use and the memory formulas count with. No import: both read them, one without MLX."""

ATTENTION_CHUNK = 512  # queries; the scores kept at a time are at most this many rows
# Logits at a time. MLX allocates for about ten operations ahead, so ten times as many are held. A CPU wants them in its
# cache; a GPU wants enough rows to pay for reading the head's weights.
LOSS_LOGITS = {"cpu": 1 << 20, "metal": 1 << 24}
