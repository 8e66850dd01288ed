"""LoRA adapters: names, shapes and numbers (`spec`), the adapter directory (`directory`, `inspect`).

`peft` and `mlx_lm` convert the formats of the tools of that name.
Only NumPy: reading an adapter needs neither torch nor MLX.
"""
