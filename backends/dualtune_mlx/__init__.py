"""The MLX backend: Apple silicon (Metal) and, slowly, any CPU; models, loading and quantization from mlx-lm.

MLX is not imported here, so that `card/` can be read without it.
"""

import os

# MLX's default lets GPUs with matrix units (M5) round the factors of float32 products. It reads the variable once per
# process, at the first product for which it matters (mlx 0.32, mlx/utils.h: enable_tf32), so it is set before any part
# of this package can import MLX. Other dtypes do not depend on it. What the user has set stays.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
