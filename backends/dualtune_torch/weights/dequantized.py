"""Published formats that are computed in the plain dtype: transformers dequantizes each tensor as it is read.

MXFP4 (gpt-oss): 4-bit codes with a shared exponent for 32 weights, of experts alone. FP8 (DeepSeek): 8-bit floats with
a scale for each block of 128 x 128 weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
from typing import Any

from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

CONFIGS = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
# On a CPU it warns that the weights are dequantized, which it was told to do.
getLogger("transformers.quantizers.quantizer_mxfp4").setLevel("ERROR")


def stored_format(config: Mapping[str, Any]) -> str | None:
    """Return the name of the format in a config.json if it is one of these."""
    name = (config.get("quantization_config") or {}).get("quant_method")
    return name if name in CONFIGS else None


def loading_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `from_pretrained` is told; nothing for a model in another format."""
    name = stored_format(config)
    return {} if name is None else {"quantization_config": CONFIGS[name](dequantize=True)}
