"""How fast GPUs multiply matrices, from their makers' data sheets: dense, bfloat16 (float16 where there is none).

A training step reaches a share of it; `dualtune bench` measures the share.
"""

from __future__ import annotations

# short name of a machine -> TFLOP/s, with sums in float32
PEAK_TFLOPS = {
    "h200": 989.0,
    "h100-80": 989.0,
    "b200": 2250.0,
    "a100-80": 312.0,
    "a100-40": 312.0,
    "l40s": 362.0,
    "l4": 121.0,
    "rtx-5090-32": 209.5,
    "rtx-5080-16": 112.6,
    "rtx-4090-24": 165.2,
    "rtx-3090-24": 71.0,
    "t4": 65.0,
    "v100-32": 125.0,
    "v100-16": 125.0,
}
