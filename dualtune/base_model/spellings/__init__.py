"""The names under which transformers and mlx-lm each look for the values of a config.json."""
