"""Base models on MLX: mlx-lm's classes, frozen; plain, in int8, or quantized in groups of 64."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.utils import load_model, quantize_model

from dualtune.base.errors import ConfigError, FormatError
from dualtune.engine.backend import LoadRequest
from dualtune.model.config_file import read_config
from dualtune.model.copies import staged
from dualtune.model.embeddings import own_head
from dualtune.model.int8 import is_quantized
from dualtune.model.spellings import complete
from dualtune.model.weight_files import BaseWeights, check_complete
from dualtune_mlx import int8
from dualtune_mlx.card.checks import emulates_bfloat16
from dualtune_mlx.families import gpt2
from dualtune_mlx.families.classes import classes
from dualtune_mlx.int8 import Int8Linear
from dualtune_mlx.packing import accept_positions
from dualtune_mlx.runtime import chip, describe_products
from dualtune_mlx.streaming import check_streamable

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
BITS = {"affine4": 4, "affine8": 8}
GROUP_SIZE = 64
# Families with sliding-window attention in transformers that mlx-lm's classes ignore.
WINDOW_IGNORED = {"mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "starcoder2", "gemma2"}


def load_base(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """Load the frozen base model, and describe how."""
    config = read_config(request.model_dir)
    quantization = _quantization(request, config)
    if request.adapter.trains_model and quantization != "none":  # a config may leave the format to the files
        raise ConfigError(
            f"adapter.method: got full, but the base is stored quantized ({quantization}), and packed weights cannot "
            "be trained. Use the plain model, or adapter.method: lora"
        )
    check_streamable(request, quantization, is_stored=config.get("quantization") is not None)
    weights = request.base_weights()
    dtype, why = choose_dtype(request.dtype, chip())
    with staged(request.model_dir, weights) as place:
        model, config = _load(request, place, weights, config)
        if "rope_theta" in config and getattr(getattr(model, "args", None), "rope_theta", 0) is None:
            raise FormatError(f"{request.model_dir / 'config.json'}: rope_theta: got null, must be a number on MLX")
        if quantization in BITS and (config.get("quantization") is None or weights is None):
            # Quantize from the stored precision, as mlx_lm.convert does, and on the CPU, because torch can compute the
            # same bytes: Metal's kernel rounds halves in another direction. Its messages go to standard error, because
            # standard output may carry a model's answer.
            with contextlib.redirect_stdout(sys.stderr), mx.stream(mx.cpu):
                model, config = quantize_model(model, config, group_size=GROUP_SIZE, bits=BITS[quantization])
        loaded_as = dtype
        if request.adapter.trains_model:
            request.adapter.check_masters(str(dtype).removeprefix("mlx.core."))
            loaded_as = DTYPES[request.adapter.master_weights]
        _compute(model, loaded_as, is_int8=quantization == "int8", streams=request.resident_layers is not None)
        model.freeze()
        model.eval()
        accept_positions(model)
    return model, {
        "model_class": f"{type(model).__module__.rsplit('.', 1)[-1]}.{type(model).__name__}",
        "device": "cpu" if chip() is None else "metal",
        "dtype": str(dtype).removeprefix("mlx.core."),
        "dtype_reason": why,
        "quantization": quantization,
        "quantization_reason": _quantization_reason(model, request, quantization),
        "num_parameters": sum(_num_weights(m) for _, m in model.named_modules()),
    }


def with_own_modules(model: nn.Module) -> nn.Module:
    """Return a copy of a model with modules of its own, which an engine may replace, but with the same weights."""
    arrays = [array for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))]
    return copy.deepcopy(model, {id(array): array for array in arrays})


def _compute(model: nn.Module, dtype: mx.Dtype, *, is_int8: bool, streams: bool) -> None:
    """Cast, quantize and evaluate the weights, which reads the files, module by module.

    The plain model is never in memory, only one of its matrices: nothing that was freed is kept for later. With
    `streams`, the decoder layers are left unread.
    """
    linear = {path: m for path, m in model.named_modules() if is_int8 and type(m) is nn.Linear and is_quantized(path)}
    stored = {path: layer.weight for path, layer in linear.items()}  # in the stored precision
    model.set_dtype(dtype)
    limit = mx.set_cache_limit(0)
    try:
        while linear:
            path, layer = linear.popitem()
            new = Int8Linear(*int8.quantize(stored.pop(path)), layer.get("bias"))
            model.update_modules(cast(dict[str, Any], tree_unflatten([(path, new)])))
        unread = {id(module) for layer in cast(Any, model).layers for module in layer.modules()} if streams else set()
        for _, module in model.named_modules():
            if id(module) not in unread:
                mx.eval([value for value in module.values() if isinstance(value, mx.array)])
        if not streams:
            mx.eval(model.parameters())
    finally:
        mx.set_cache_limit(limit)


def _load(
    request: LoadRequest, place: Path, weights: BaseWeights | None, config: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    keys = _plain_keys(config, weights)
    if weights is None:
        mx.random.seed(request.seed)
        return load_model(place, lazy=True, strict=False, model_config=keys, get_model_classes=classes)
    return load_model(place, lazy=True, model_config=keys, get_model_classes=_checking(request.model_dir, classes))


Choose = Callable[[dict[str, Any]], tuple[type[nn.Module], type]]


def _checking(model_dir: Path, choose: Choose) -> Choose:
    """Wrap a choice of model class: the class then reports wrong tensors by name before it reads them."""

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = choose(config)

        class Checked(model_class):
            def load_weights(self, file_or_weights: Any, strict: bool = True) -> nn.Module:
                stored = {name: tensor.shape for name, tensor in file_or_weights}
                own = cast(list[tuple[str, mx.array]], tree_flatten(self.parameters()))
                needed = {name: tensor.shape for name, tensor in own}
                check_complete(
                    model_dir,
                    missing=needed.keys() - stored.keys(),
                    unexpected=stored.keys() - needed.keys(),
                    mismatched={
                        name: f"stored {list(stored[name])}, needed {list(needed[name])}"
                        for name in needed.keys() & stored.keys()
                        if stored[name] != needed[name]
                    },
                )
                return super().load_weights(file_or_weights, strict)

        Checked.__module__, Checked.__name__ = model_class.__module__, model_class.__name__
        return Checked, args_class

    return classes


def _plain_keys(config: dict[str, Any], weights: BaseWeights | None) -> dict[str, Any]:
    """Return config keys in the spelling that mlx-lm reads.

    If `tie_word_embeddings` is absent, mlx-lm's Llama ties and discards the stored output head, while Hugging Face does
    not tie. A stored head that differs from the embedding is used whatever the config says, as by transformers.
    """
    keys: dict[str, Any] = {}
    if weights is not None:
        is_open = "tie_word_embeddings" not in config and "lm_head.weight" in weights.tensors
        if is_open or own_head(weights.tensors):
            keys["tie_word_embeddings"] = False
    if config.get("model_type") == "gpt2":
        gpt2.check_computed(config)
    return complete(config, keys)


def refuse_beyond_window(request: LoadRequest) -> None:
    """Raise ConfigError for documents that are longer than an attention window that mlx-lm ignores."""
    config = read_config(request.model_dir)
    kind, window = config.get("model_type"), config.get("sliding_window")
    ignored = kind in WINDOW_IGNORED and not (kind == "mistral" and "layer_types" in config)  # mlx-lm honours those
    if window and ignored and config.get("use_sliding_window", True) and request.longest > window:
        raise ConfigError(
            f"data.max_length: the longest document has {request.longest} tokens, but this model has an attention "
            f"window of {window}, which mlx-lm does not implement for it. Set data.max_length to at most {window}"
        )


def choose_dtype(name: str, gpu: str | None) -> tuple[mx.Dtype, str]:
    """Return the compute dtype for a value of model.dtype, and why. `gpu`: such as "Apple M1"; None: a CPU.

    bfloat16 on every GPU, also on those that emulate it: docs/decisions/0034.
    """
    if gpu is None:
        auto, why = mx.float32, "MLX on a CPU has no fast half precision"
    else:
        auto, why = mx.bfloat16, "the range of float32, and the default on NVIDIA too"
    dtype, why = (auto, why) if name == "auto" else (DTYPES[name], "as configured")
    if gpu is not None and dtype == mx.bfloat16 and emulates_bfloat16(gpu):
        why += f"; {gpu} has no bfloat16 and computes it in float32: model.dtype: float16 would be faster"
    if gpu is not None and dtype == mx.float32:
        why += f"; {describe_products()}"
    return dtype, why


def _quantization(request: LoadRequest, config: dict[str, Any]) -> str:
    """Return the quantization of the loaded base: "none", "int8" or one of BITS. Refuses other stored formats."""
    stored = config.get("quantization")
    if stored is None and config.get("quantization_config") is not None:
        raise ConfigError(
            f"model.name: {request.model_dir} is stored quantized for another framework "
            f"({config['quantization_config'].get('quant_method', 'unknown')}). Use the plain model with "
            "model.quantization: affine4, or one in MLX format"
        )
    if stored is None:
        return "none" if request.quantization == "auto" else request.quantization
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
    if quantization not in BITS or not plain:
        return reason
    # Routers, and layers whose inputs are not a multiple of 64.
    return f"{reason}; mlx-lm does not quantize {plain} linear layers"


def _num_weights(module: nn.Module) -> int:
    total = 0
    arrays: Any = tree_flatten(module.parameters(), is_leaf=lambda v: isinstance(v, mx.array))
    for name, value in arrays:
        if "." in name:
            continue  # a child's, which is counted there
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)) and name == "weight":
            total += value.size * 32 // module.bits
        elif name not in ("scales", "biases"):
            total += value.size
    return total


def modules_with_modes(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute otherwise in training: whose class reads `self.training`."""
    reads: dict[type, bool] = {}
    for module in cast(list[nn.Module], model.modules()):
        kind = type(module)
        if kind not in reads:
            methods = (
                getattr(each, "fget", each)
                for base in kind.__mro__[: kind.__mro__.index(nn.Module)]
                for each in vars(base).values()
            )
            reads[kind] = any(
                "training" in each.__code__.co_names for each in methods if isinstance(each, FunctionType)
            )
    return [module for module in cast(list[nn.Module], model.modules()) if reads[type(module)]]
