"""Base models on MLX: mlx-lm's classes, frozen, plain or quantized in groups of 64."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from dualtune.backend import LoadRequest
from dualtune.errors import ConfigError, EnvironmentFault
from dualtune_mlx.packing import accept_positions

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
BITS = {"affine4": 4, "affine8": 8}
GROUP_SIZE = 64
# Families whose models attend in a sliding window in Hugging Face, while mlx-lm's classes attend to everything.
WINDOW_IGNORED = {"mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "starcoder2", "gemma2"}


def load_base(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """The frozen base model, and what was chosen for it."""
    config = json.loads((request.model_dir / "config.json").read_text(encoding="utf-8"))
    quantization = _quantization(request, config)
    _refuse_beyond_window(request, config)
    dtype, why = _dtype(request.dtype)
    try:
        model, config = _load(request, config)
    except (OSError, ValueError, KeyError, TypeError, ModuleNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFault(f"{request.model_dir}: mlx-lm cannot load this model: {reason}") from error
    if quantization in BITS and ("quantization" not in config or request.init == "random"):
        # From the stored precision, as mlx_lm.convert does. On the processor, whose bytes torch can make too: Metal's
        # kernel rounds halves in another direction. What it prints is not for standard output, a model's answer may be.
        with contextlib.redirect_stdout(sys.stderr), mx.stream(mx.cpu):
            model, config = quantize_model(model, config, group_size=GROUP_SIZE, bits=BITS[quantization])
    model.set_dtype(dtype)
    model.freeze()
    model.eval()
    accept_positions(model)
    mx.eval(model.parameters())
    return model, {
        "model_class": f"{type(model).__module__.rsplit('.', 1)[-1]}.{type(model).__name__}",
        "device": "metal" if mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu else "cpu",
        "dtype": str(dtype).removeprefix("mlx.core."),
        "dtype_reason": why,
        "quantization": quantization,
        "quantization_reason": _quantization_reason(model, request, quantization),
        "num_parameters": sum(_num_weights(m) for _, m in model.named_modules()),
    }


def _load(request: LoadRequest, config: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    if request.init == "pretrained":
        names = _weight_names(request.model_dir)
        return load_model(request.model_dir, lazy=True, model_config=_plain_keys(config, names))
    mx.random.seed(request.seed)
    with tempfile.TemporaryDirectory() as empty:  # a directory without weights leaves the model as it was drawn
        (Path(empty) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return load_model(Path(empty), lazy=True, strict=False, model_config=_plain_keys(config, None))


def _plain_keys(config: dict[str, Any], weight_names: set[str] | None) -> dict[str, Any]:
    """Config keys in the spelling that mlx-lm reads.

    Two traps, both silent. transformers 5 writes `rope_parameters`, while mlx-lm's Llama and others read `rope_theta`,
    `rope_scaling` and `partial_rotary_factor` and fall back to defaults such as a base of 10000. And where
    `tie_word_embeddings` is absent, mlx-lm's Llama ties and throws the stored output head away, while Hugging Face does
    not tie.
    """
    keys: dict[str, Any] = {}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        found = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        if rope.get("rope_type", "default") != "default":
            found["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        keys |= {name: value for name, value in found.items() if config.get(name) is None}
    if "tie_word_embeddings" not in config and weight_names is not None and "lm_head.weight" in weight_names:
        keys["tie_word_embeddings"] = False
    return keys


def _weight_names(model_dir: Path) -> set[str]:
    return {name for file in model_dir.glob("model*.safetensors") for name in mx.load(str(file))}


def check_names(model_dir: Path, modules: list[str]) -> None:
    """ConfigError unless the adapted modules are called in MLX as in the weight files: else no adapter could move."""
    names = _weight_names(model_dir)
    renamed = [module for module in modules if f"{module}.weight" not in names]
    if names and renamed:
        raise ConfigError(
            f"adapter.targets: mlx-lm calls {len(renamed)} of the adapted modules otherwise than the model's files do "
            f"(for example {renamed[0]}), so the adapter would fit no other program. Choose other targets"
        )


def _refuse_beyond_window(request: LoadRequest, config: dict[str, Any]) -> None:
    kind, window = config.get("model_type"), config.get("sliding_window")
    ignored = kind in WINDOW_IGNORED and not (kind == "mistral" and "layer_types" in config)  # those are honoured
    if window and ignored and config.get("use_sliding_window", True) and request.longest > window:
        raise ConfigError(
            f"data.max_length: the longest document has {request.longest} tokens, but this model attends in a window of"
            f" {window}, which mlx-lm does not implement for it. Set data.max_length to at most {window}"
        )


def _dtype(name: str) -> tuple[mx.Dtype, str]:
    if name != "auto":
        return DTYPES[name], "as configured"
    if not mx.metal.is_available():
        return mx.float32, "MLX on a CPU has no fast half precision"
    return mx.bfloat16, "the range of float32, and what the NVIDIA side uses"


def _quantization(request: LoadRequest, config: dict[str, Any]) -> str:
    """What the loaded base will be: "none", "affine4" or "affine8". Refuses a directory stored in another way."""
    stored = config.get("quantization")
    if stored is None and "quantization_config" in config:
        raise ConfigError(
            f"model.name: {request.model_dir} is stored quantized for another framework "
            f"({config['quantization_config'].get('quant_method', 'unknown')}). Use the plain model with "
            "model.quantization: affine4, or one in MLX format"
        )
    if stored is None:
        return request.quantization if request.quantization in BITS else "none"
    kind = {bits: name for name, bits in BITS.items()}.get(stored.get("bits"), f"{stored.get('bits')}-bit")
    if stored.get("mode", "affine") != "affine" or stored.get("group_size") != GROUP_SIZE or kind not in BITS:
        kind = f"{stored.get('mode', 'affine')} {stored.get('bits')}-bit, groups of {stored.get('group_size')}"
    if request.quantization not in ("auto", kind):
        raise ConfigError(
            f"model.quantization: got '{request.quantization}', but {request.model_dir} is stored as {kind}"
        )
    return kind


def _quantization_reason(model: nn.Module, request: LoadRequest, quantization: str) -> str:
    reason = "as stored" if request.quantization == "auto" else "as configured"
    plain = sum(isinstance(module, nn.Linear) for _, module in model.named_modules())
    if quantization == "none" or not plain:
        return reason
    return f"{reason}; mlx-lm leaves {plain} linear layers plain"  # inputs that are no multiple of 64, routers


def _num_weights(module: nn.Module) -> int:
    total = 0
    for name, value in tree_flatten(module.parameters(), is_leaf=lambda v: isinstance(v, mx.array)):
        if "." in name:
            continue  # a child's; counted there
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)) and name == "weight":
            total += value.size * 32 // module.bits
        elif name not in ("scales", "biases"):
            total += value.size
    return total
