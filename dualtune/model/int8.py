"""int8: the rule by which both backends quantize the linear layers of a base model to 8 bits.

Symmetric, with a scale for each output row ("row-wise absmax"; Dettmers et al., LLM.int8(), arXiv 2208.07339, section
2.1). Only weights are quantized: products are computed in the compute dtype. A backend computes the rule on its device
and gives the same codes and scales to the bit. Embedding, output head and norms stay plain.

Legend: O output and I input features of a weight.
"""

from __future__ import annotations

import numpy as np

from dualtune.model.targets import OUTPUT_HEAD

LARGEST_CODE = 127  # -128 is not used, so that a weight and its negative have opposite codes
# The least scale, the smallest normal float32: some devices compute with smaller numbers as if they were zero.
LEAST_SCALE = float(np.finfo(np.float32).tiny)


def is_quantized(path: str) -> bool:
    """Return whether the linear layer at this module path is quantized: all but the output head."""
    return path.rpartition(".")[2] != OUTPUT_HEAD


def quantize(weight_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes, int8 [O, I] in -127…127, and the scales, float32 [O], of a matrix of finite weights.

    scale = max |w| of the row / 127, and code = w / scale rounded half to even, each operation in float32. A row
    whose scale would be less than LEAST_SCALE counts as zeros: its scale and codes are 0.

    Error: the weight that `dequantize` returns differs from w by at most scale · (1/2 + 2⁻¹⁶), that is, by 0.4 % of the
    largest weight of its row; for a row that counts as zeros, by 127 · LEAST_SCALE. Zero is exact. Proof: rounding to a
    code costs 1/2; quotient and product, at most 127 of a scale, each have a relative rounding error of 2⁻²⁴.
    """
    weight_OI = weight_OI.astype(np.float32)
    scale_O = np.abs(weight_OI).max(axis=1) / np.float32(LARGEST_CODE)
    scale_O[scale_O < LEAST_SCALE] = 0
    divisor_O = np.where(scale_O == 0, np.float32(np.inf), scale_O)  # anything / ∞ = 0
    return np.rint(weight_OI / divisor_O[:, None]).astype(np.int8), scale_O


def dequantize(codes_OI: np.ndarray, scale_O: np.ndarray) -> np.ndarray:
    """Return the weights code · scale in float32. A 16-bit compute dtype rounds these products once."""
    return codes_OI * scale_O[:, None]
