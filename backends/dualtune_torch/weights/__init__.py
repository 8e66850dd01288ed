"""Frozen weights in the formats that they have: plain, NF4, or MLX's packed 4 and 8 bits."""
