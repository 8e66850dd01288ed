"""Base models on torch: transformers classes, frozen; plain, or in bitsandbytes' NF4, int8 or MLX's affine format."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.model.config_file import read_config
from dualtune.model.copies import staged
from dualtune.model.embeddings import own_head
from dualtune.model.int8 import is_quantized
from dualtune.model.targets import is_router
from dualtune.model.weight_files import BaseWeights, check_complete
from dualtune_torch.expert_forms import with_common_forms
from dualtune_torch.experts import expert_modules, has_common_code, packed
from dualtune_torch.host import streaming
from dualtune_torch.kernels import allocator
from dualtune_torch.sharding import decide
from dualtune_torch.weights import affine_model, by_module, direct_reads, nf4
from dualtune_torch.weights.affine import BITS, GROUP_SIZE
from dualtune_torch.weights.frozen import num_parameters
from dualtune_torch.weights.int8 import Int8Linear
from dualtune_torch.weights.text_part import empty_model, text_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_base(request: LoadRequest, device: torch.device) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the base model, frozen, and describe how. It is on its device, or on the host if it will be sharded."""
    dtype, why = _dtype(request.dtype, device)
    config = read_config(request.model_dir)
    quantization = _quantization(request, config)
    if request.adapter.trains_model and quantization != "none":  # a config may leave the format to the files
        raise ConfigError(
            f"adapter.method: got full, but the base is stored quantized ({quantization}), and packed weights cannot "
            "be trained. Use the plain model, or adapter.method: lora"
        )
    # All processes decide alike before any of them reads a weight.
    weights = request.base_weights()
    sharding, why_sharding = decide(request, dtype, quantization, device)
    description = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "dtype_reason": why,
        "quantization": quantization,
        "quantization_reason": _quantization_reason(request, config),
        "sharding": sharding,
        "sharding_reason": why_sharding,
    }
    if sharding == "full":
        device = torch.device("cpu")
    # A base whose layers are streamed stays on the host; what is quantized here is quantized on the device.
    place_on = device if request.resident_layers is None else torch.device("cpu")
    loaded_as = dtype
    if request.adapter.trains_model:
        request.adapter.check_masters(description["dtype"])
        loaded_as = DTYPES[request.adapter.master_weights]
    logging.disable_progress_bar()  # the command line has its own
    with staged(request.model_dir, weights) as place, allocator.memory_returned():
        is_stored = quantization == "nf4" and config.get("quantization_config") is not None
        if quantization == "none" and weights is None:
            model = _random(request, place, loaded_as, place_on)
        elif weights is not None and (quantization == "none" or is_stored):
            model = _pretrained(place, weights, loaded_as, place_on, **by_module.loading_options(config))
        else:
            model = _module_by_module(request, place, weights, dtype, device, quantization)
    # Loading has returned what it freed; training keeps freed blocks, but not where memory is short.
    if sharding == "full" or request.resident_layers is not None:
        allocator.return_memory()  # whole layers are allocated and freed in every step, or memory is what is short
    direct_reads.unpack_read(model, dtype)
    model.requires_grad_(False)
    model.eval()  # dropout inside the base model stays off
    nf4.keep_differentiable(model, dtype)
    plain = sum(type(module) is nn.Linear for module in model.modules())
    if quantization in BITS and plain:
        description["quantization_reason"] += f"; {plain} linear layers are not quantized"
    return model, {"model_class": type(model).__name__} | description | {"num_parameters": num_parameters(model)}


def with_own_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model with modules of its own, which an engine may replace, but with the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def _dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    if name != "auto":
        return DTYPES[name], "as configured"
    if device.type == "cpu":
        return torch.float32, "exact on every CPU"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "this GPU computes in bfloat16"
    return torch.float16, "this GPU has no bfloat16"


def _quantization(request: LoadRequest, config: dict[str, Any]) -> str:
    """Return the quantization of the loaded base: "none", "nf4", "int8" or one of BITS. Refuses other stored ones."""
    mlx, other = config.get("quantization"), config.get("quantization_config")
    if mlx is not None:
        kind = _mlx_kind(mlx)
    elif (kind := by_module.stored_format(config)) is not None:
        if request.quantization not in ("auto", "none"):
            raise ConfigError(
                f"model.quantization: got '{request.quantization}', but {request.model_dir} is stored in {kind}, which "
                "is dequantized as it is read. Allowed: auto, none; or use a copy of the model in bfloat16"
            )
        return "none"
    elif other is not None:
        is_nf4 = other.get("load_in_4bit") and other.get("bnb_4bit_quant_type") == "nf4"
        kind = "nf4" if is_nf4 else str(other.get("quant_method", "unknown"))
    else:
        return "none" if request.quantization == "auto" else request.quantization
    if kind not in ("nf4", *BITS) or request.quantization not in ("auto", kind):
        raise ConfigError(
            f"model.quantization: got '{request.quantization}', but {request.model_dir} is stored quantized as {kind}. "
            "Allowed: plain weights; mxfp4 and fp8, which are dequantized; bitsandbytes' NF4 with auto or nf4; and "
            f"MLX's 4 or 8 bits in groups of {GROUP_SIZE} with auto, affine4 or affine8"
        )
    return kind


def _quantization_reason(request: LoadRequest, config: dict[str, Any]) -> str:
    if kind := by_module.stored_format(config):
        return f"stored as {kind}, dequantized as it was read"
    return "as stored" if request.quantization == "auto" else "as configured"


def _mlx_kind(stored: dict[str, Any]) -> str:
    mode, bits, size = stored.get("mode", "affine"), stored.get("bits"), stored.get("group_size")
    names: dict[Any, str] = {("affine", number, GROUP_SIZE): name for name, number in BITS.items()}
    return names.get((mode, bits, size), f"{mode} {bits}-bit, groups of {size}")


def _pretrained(
    place: Path, weights: BaseWeights, dtype: torch.dtype, device: torch.device, **options: Any
) -> PreTrainedModel:
    """Load the weights by transformers: plain ones, or those stored in NF4."""
    config = _config(place, weights)
    if getattr(config, "quantization_config", None) is None:
        _check_by_headers(config, weights)
    model_class, config = text_model(config)
    model, info = cast(Any, model_class).from_pretrained(
        place, config=config, dtype=dtype, device_map={"": device}, ignore_mismatched_sizes=True,
        output_loading_info=True, local_files_only=True, use_safetensors=True, trust_remote_code=False, **options,
    )  # fmt: skip
    _check_loaded(info, weights)
    return with_common_forms(model)


def _check_by_headers(config: PreTrainedConfig, weights: BaseWeights) -> None:
    """Raise FormatError, before any weight is read, if the tensors do not fit the model by transformers' own rules.

    transformers itself loads tensors without data into a model without data, because only it knows which names a class
    renames, joins or leaves out.
    """
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in weights.tensors.items()}
    model_class, config = text_model(config)
    _, info = cast(Any, model_class).from_pretrained(
        None, config=config, state_dict=empty, device_map={"": "meta"}, ignore_mismatched_sizes=True,
        output_loading_info=True, local_files_only=True,
    )  # fmt: skip
    _check_loaded(info, weights)


def _check_loaded(info: dict[str, Any], weights: BaseWeights) -> None:
    mismatched = {
        name: f"stored {list(stored)}, needed {list(needed)}" for name, stored, needed in info["mismatched_keys"]
    }
    check_complete(
        weights.directory,
        missing=info["missing_keys"],
        unexpected=info["unexpected_keys"],
        mismatched=mismatched,
    )


def _config(place: Path, weights: BaseWeights | None = None) -> PreTrainedConfig:
    kind = read_config(place).get("model_type")
    if kind is not None and kind not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} knows no model_type '{kind}', and code of a model is not run"
        )  # in a sentence that names the model: `dualtune.engine.backend.loading`
    config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    if weights is not None and own_head(weights.tensors):
        # As transformers does with weights that it reads itself; a head that is quantized here would be tied.
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    return config


def _random(request: LoadRequest, place: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(request.seed)
    with torch.device(device):
        return with_common_forms(empty_model(_config(place), dtype))


def _module_by_module(
    request: LoadRequest,
    place: Path,
    weights: BaseWeights | None,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str,
) -> PreTrainedModel:
    """Initialize or read, and quantize, one module after another: the plain model need not fit in memory."""
    config = _config(place, weights)
    is_packed = getattr(config, "quantization", None) is not None
    place_on = device if request.resident_layers is None else torch.device("cpu")
    if quantization in BITS and (weights is None or not is_packed):
        affine_model.check_family(request.model_dir, config.model_type)
    with torch.device(device), init_empty_weights(include_buffers=False):
        model = with_common_forms(empty_model(config, dtype))
    if weights is not None and is_packed:
        affine_model.load(model, weights, dtype, place_on)
        return model
    # The weights are plain from here on: read or drawn module by module, and quantized one by one.
    finish = _finish(quantization, dtype, model.get_output_embeddings(), config.model_type)
    if request.resident_layers is not None:
        finish = streaming.kept_on_host(finish, model)
    if weights is not None:
        if quantization == "nf4" and not by_module.can_load(model, weights):
            model = _pretrained(place, weights, dtype, place_on, quantization_config=nf4.config(dtype))
            for path, module in expert_modules(model, strict=False).items():
                model.set_submodule(path, packed(module, dtype, partial(nf4.linear, dtype=dtype)))
            return model
        _check_by_headers(config, weights)
        if made := by_module.made_otherwise(model, weights):
            chosen = f"model.quantization: got '{quantization}'"
            if request.resident_layers is not None:
                chosen = f"memory.resident_layers: got {request.resident_layers}"
            raise ConfigError(
                f"{chosen}, which reads a model tensor by tensor, but transformers makes {made} of several tensors of "
                "the files. Allowed: model.quantization none or nf4, without memory.resident_layers"
            )
        by_module.load(model, weights, finish, device)
        return model
    torch.manual_seed(request.seed)

    def initialized(path: str, module: nn.Module) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            drawn = torch.empty_like(parameter, device=device).normal_(std=0.02)
            setattr(module, name, nn.Parameter(drawn, requires_grad=False))
        model._init_weights(module)  # the model's own initialization: a norm's weights are ones
        return finish(path, module)

    by_module.replace_modules(model, initialized)
    return model


def _finish(quantization: str, dtype: torch.dtype, head: nn.Module | None, family: str) -> by_module.Finish:
    """Return what quantizes a module with plain weights. `head`: the output head of the model."""
    if quantization == "nf4":  # as transformers: all plain linear layers except the output head; and stacked experts
        make = partial(nf4.linear, dtype=dtype)

        def finish(path: str, module: nn.Module) -> nn.Module:
            if has_common_code(path, module):
                return packed(module, dtype, make)
            return by_module.finished(module, dtype, None if module is head else make)

        return finish
    if quantization == "int8":
        return lambda path, module: by_module.finished(module, dtype, Int8Linear if is_quantized(path) else None)

    def as_mlx_lm(path: str, module: nn.Module) -> nn.Module:
        if has_common_code(path, module):
            return packed(module, dtype, lambda weight, _: affine_model.expert_matrix(weight, quantization, dtype))
        if is_router(path) and not isinstance(module, nn.Linear):
            return affine_model.rounded_router(module, quantization, family, dtype)
        return affine_model.finished(module, quantization, dtype)

    return as_mlx_lm
