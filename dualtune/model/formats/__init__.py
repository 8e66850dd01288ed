"""The files of an adapter: PEFT's, mlx-lm's, or both in one directory."""
