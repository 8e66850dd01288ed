"""Families of models as mlx-lm's classes compute them: the keys they read, and what they lack."""
