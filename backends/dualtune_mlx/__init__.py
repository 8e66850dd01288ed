"""The MLX backend: Apple silicon (Metal) and, slowly, any CPU; models, loading and quantization from mlx-lm.

Nothing is imported here, so that `card/` can be read without MLX.
"""
