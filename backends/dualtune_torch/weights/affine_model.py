"""Models in MLX's affine quantization: read from a directory that mlx-lm wrote, or quantized from a plain one.

Quantization produces the bytes that `mlx_lm.convert` produces from the stored precision; the bytes of a quantized
directory do not change.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune.model.weight_files import BaseWeights
from dualtune_torch.weights.affine import (
    BITS,
    GROUP_SIZE,
    AffineEmbedding,
    AffineLayer,
    AffineLinear,
    Packed,
    dequantize,
    quantize,
)
from dualtune_torch.weights.by_module import TensorReader, frozen, own, replace_modules

# Model families that are quantized here layer by layer, exactly as in mlx-lm. It has special rules for others, such as
# 8 bits for some layers of Granite. A family is listed once all its bytes were compared with mlx-lm's:
# `pytest tests/parity/test_affine4.py tests/parity/test_affine_experts.py`.
FAMILIES = (
    "gemma", "gemma2", "llama", "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "smollm3",
)  # fmt: skip
ROUTERS_IN_8_BITS = ("qwen3_moe",)  # by a rule of mlx-lm's class; other routers are quantized as all layers are


def load(model: PreTrainedModel, stored: BaseWeights, dtype: torch.dtype, device: torch.device) -> None:
    """Load a directory in MLX format into an empty model."""

    def replacement(path: str, module: nn.Module) -> nn.Module:
        if f"{path}.scales" in weights:
            return _packed(weights, path, module, dtype, device)
        return finished(weights.fill(path, module, device), None, dtype)

    weights = TensorReader(stored, model)
    replace_modules(model, replacement)
    weights.check_all_read(unused={*model.all_tied_weights_keys})


def _packed(
    weights: TensorReader, path: str, module: nn.Module, dtype: torch.dtype, device: torch.device
) -> AffineLayer:
    """Read a layer with its packed bytes from a directory in MLX format."""
    rows, columns = cast(Tensor, module.weight).shape
    words = [(rows, columns * bits // 32) for bits in BITS.values()]
    shape = next((shape for shape in words if weights.shape(f"{path}.weight") == shape), words[0])
    packed = Packed(
        weights.read(f"{path}.weight", shape, (torch.uint32,)).view(torch.uint8).to(device),
        *(weights.read(f"{path}.{part}", (rows, columns // GROUP_SIZE)).to(device) for part in ("scales", "biases")),
    )
    if "bias" in own(module):
        module.bias = frozen(weights.read(f"{path}.bias", (rows,)).to(device, dtype))
    return in_place_of(module, packed.cast(dtype))


def finished(module: nn.Module, quantization: str | None, dtype: torch.dtype) -> nn.Module:
    """Prepare a module with its stored weights for computing: quantized where mlx-lm does so, else cast.

    mlx-lm quantizes the weight of every linear layer and embedding if its rows consist of whole groups.
    """
    plain, packed = own(module), None
    if quantization is not None and isinstance(module, nn.Linear | nn.Embedding):
        weight_OI = plain["weight"].data
        if weight_OI.shape[1] % GROUP_SIZE == 0:
            packed = quantize(weight_OI, BITS[quantization]).cast(dtype)
            del plain["weight"]
    for name, parameter in plain.items():
        setattr(module, name, frozen(parameter.to(dtype)))
    return module if packed is None else in_place_of(module, packed)


def rounded_router(router: nn.Module, quantization: str, family: str, dtype: torch.dtype) -> nn.Module:
    """Give a router, which multiplies by its matrix itself, the numbers that mlx-lm's packed one has."""
    weight_EI = own(router)["weight"].data
    if weight_EI.shape[1] % GROUP_SIZE == 0:
        bits = 8 if family in ROUTERS_IN_8_BITS else BITS[quantization]
        weight_EI = dequantize(quantize(weight_EI, bits).cast(dtype))
    router.weight = frozen(weight_EI.to(dtype))
    return router


def expert_matrix(weight_OI: Tensor, quantization: str, dtype: torch.dtype) -> nn.Module:
    """Return the layer for the matrix of an expert, packed where its rows are whole groups, as by mlx-lm."""
    if weight_OI.shape[1] % GROUP_SIZE == 0:
        return AffineLinear(quantize(weight_OI, BITS[quantization]).cast(dtype), None)
    plain = nn.Linear(*weight_OI.shape[::-1], bias=False, device="meta")
    plain.weight = frozen(weight_OI.to(dtype))
    return plain


def in_place_of(module: nn.Module, packed: Packed) -> AffineLayer:
    """Return the packed layer for a module. Raises ConfigError for a module that is more than a plain matrix."""
    kind, factor = type(module), getattr(module, "embed_scale", None)
    if kind is nn.Linear:
        return AffineLinear(packed, cast(nn.Linear, module).bias)
    if kind is nn.Embedding:
        return AffineEmbedding(packed)
    if kind.__name__.endswith("ScaledWordEmbedding") and isinstance(factor, Tensor):  # Gemma's: rows times a number
        return AffineEmbedding(packed, factor)
    raise ConfigError(
        f"model.quantization: transformers' {kind.__name__} is not a plain matrix, and the backend 'torch' "
        "cannot quantize it. Use model.quantization: none or nf4, or --platform mlx"
    )


def check_family(model_dir: Path, family: str) -> None:
    """Raise ConfigError for a model family that mlx-lm may quantize differently."""
    if family not in FAMILIES:
        raise ConfigError(
            f"model.quantization: the backend 'torch' does not know which layers of a {family} model mlx-lm quantizes; "
            f"it knows {', '.join(FAMILIES)}. Quantize with mlx-lm, which runs on Linux too: "
            f"mlx_lm.convert --hf-path {model_dir} -q, and train on its output; or use model.quantization: nf4"
        )
