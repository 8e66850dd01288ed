"""The MLX backend: Apple silicon (Metal) and, slowly, any CPU; models, loading and quantization from mlx-lm."""

from dualtune_mlx.backend import MlxBackend as backend

__all__ = ["backend"]
