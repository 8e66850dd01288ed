"""Base models on torch: transformers classes, frozen, plain or NF4-quantized by bitsandbytes."""

from __future__ import annotations

import json
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from dualtune.adapter.spec import OUTPUT_HEAD
from dualtune.backend import LoadRequest
from dualtune.errors import ConfigError, EnvironmentFault

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_base(request: LoadRequest, device: torch.device) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The frozen base model on its device, and what was chosen for it."""
    dtype, why = _dtype(request.dtype, device)
    quantization = _quantization(request)
    logging.disable_progress_bar()  # the command line has its own
    try:
        if request.init == "random":
            model = _random(request, dtype, device, quantization)
        else:
            model = _pretrained(request, dtype, device)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFault(f"{request.model_dir}: torch cannot load this model: {reason}") from error
    model.requires_grad_(False)
    model.eval()  # dropout inside the base model stays off
    for module in model.modules():
        if _is_4bit(module):
            # In eval mode bitsandbytes repacks the weights of a Linear4bit for its CPU inference kernel, which has no
            # backward pass: gradients through the layer would vanish without a word.
            module.train()
            # And the config of a stored model names a compute dtype of its own, which would win over ours.
            module.compute_dtype, module.compute_type_is_set = dtype, True
    stored = "as stored" if request.quantization == "auto" else "as configured"
    return model, {
        "model_class": type(model).__name__,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "dtype_reason": why,
        "quantization": quantization,
        "quantization_reason": stored,
        "num_parameters": model.num_parameters(),
    }


def _dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    if name != "auto":
        return DTYPES[name], "as configured"
    if device.type == "cpu":
        return torch.float32, "exact on every CPU"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "this GPU computes in bfloat16"
    return torch.float16, "this GPU has no bfloat16"


def _quantization(request: LoadRequest) -> str:
    """What the loaded base will be: "none" or "nf4". Refuses a directory that is stored in another way."""
    config = json.loads((request.model_dir / "config.json").read_text(encoding="utf-8"))
    if "quantization" in config:
        raise ConfigError(
            f"model.name: {request.model_dir} holds MLX-quantized weights, which the backend 'torch' does not load. "
            "Use the unquantized model (with model.quantization: nf4 if memory is short), or --platform mlx"
        )
    stored = config.get("quantization_config")
    if stored is None:
        return "nf4" if request.quantization == "nf4" else "none"
    kind = "nf4" if stored.get("load_in_4bit") and stored.get("bnb_4bit_quant_type") == "nf4" else "unknown"
    if kind == "unknown" or request.quantization == "none":
        raise ConfigError(
            f"model.quantization: got '{request.quantization}', but {request.model_dir} is stored quantized as "
            f"{stored.get('quant_method', 'unknown')}. Allowed: plain weights, or bitsandbytes NF4 with auto or nf4"
        )
    return kind


def _pretrained(request: LoadRequest, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    options: dict[str, Any] = {}
    if request.quantization == "nf4":  # otherwise the stored config says so
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return AutoModelForCausalLM.from_pretrained(
        request.model_dir,
        dtype=dtype,
        device_map={"": device},
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        **options,
    )


def _random(request: LoadRequest, dtype: torch.dtype, device: torch.device, quantization: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(request.model_dir, local_files_only=True, trust_remote_code=False)
    torch.manual_seed(request.seed)
    if quantization == "nf4":
        return _random_nf4(config, dtype, device)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _random_nf4(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Drawn and quantized one module after the other, because the plain model need not fit where this one does."""
    with torch.device(device), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for path in [path for path, _ in model.named_modules()]:  # not the modules: a list of them would keep them all
        module = model.get_submodule(path)
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            drawn = torch.empty_like(parameter, device=device).normal_(std=0.02)
            setattr(module, name, nn.Parameter(drawn, requires_grad=False))
        if own:
            model._init_weights(module)  # as the model would have drawn it: a norm's weights are ones
        if isinstance(module, nn.Linear) and path.split(".")[-1] != OUTPUT_HEAD:
            model.set_submodule(path, _nf4(module, dtype))
    model.tie_weights()
    return model


def _nf4(layer: nn.Linear, compute_dtype: torch.dtype) -> nn.Module:
    """A bitsandbytes NF4 layer with double quantization, of the same weights."""
    import bitsandbytes as bnb

    quantized = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=compute_dtype,
        compress_statistics=True, quant_type="nf4", device="meta",
    )  # fmt: skip
    weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
    quantized.weight = weight.to(layer.weight.device)  # quantizes
    quantized.bias = layer.bias
    return quantized


def _is_4bit(module: nn.Module) -> bool:
    return type(module).__name__ == "Linear4bit"
