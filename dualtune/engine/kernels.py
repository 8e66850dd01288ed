"""LoRA for code of one's own: layers in a module, and the backward pass of one as a function on tensors.

Both are computed by the backend of the framework whose modules or tensors they are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Protocol, cast

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import backend_factory, check_state
from dualtune.engine.card import cards
from dualtune.model.adapter import AdapterSpec, Tensors, parse_name, tensor_name
from dualtune.model.targets import ALL_LINEAR, is_target


class LoRABackward(Protocol):
    """A backend that has the function. It is optional: the training loop does not need it."""

    def lora_backward(
        self, grad_out: Any, x: Any, lora_down: Any, lora_up: Any, scale: float, *, need_grad_x: bool, require_gpu: bool
    ) -> tuple[Any, ...]: ...


class LoRALayers(Protocol):
    """A backend with a layer for modules of one's own. Optional too; paths are those of the framework."""

    def linear_shapes(self, model: Any) -> Mapping[str, tuple[int, int]]: ...
    def add_lora_layers(self, model: Any, paths: Iterable[str], spec: AdapterSpec, seed: int) -> None: ...
    def lora_layers(self, model: Any) -> Mapping[str, Any]: ...


# ----------------------------------------------------------------------------------------------------------------------
# LoRA in a module. An adapter in the files of dualtune is `Adapter(spec, lora_tensors(model))` of
# `dualtune.model.formats.directory`, with `write_adapter` and `read_adapter`.


def add_lora(model: Any, spec: AdapterSpec, *, seed: int = 0) -> list[str]:
    """Freeze a torch.nn.Module or mlx.nn.Module, put LoRA on the linear layers in `spec.targets`, return their paths.

    `targets` are paths or their ends as in PEFT; "all-linear" is every linear layer. The layers are replaced in place
    by `LoRALayer` of the backend, with A and B as the only trainable parameters. The start depends on seed and path
    alone, so it is the same in both frameworks.

    Raises ConfigError for a method other than LoRA and for a target that selects nothing, TypeError for a module that
    is of no framework with such a layer.
    """
    if spec.method != "lora":
        raise ConfigError(f"add_lora: method: got {spec.method!r}, allowed: lora")
    if spec.keeps_start:
        raise ConfigError(f"add_lora: init: got {spec.init!r}, allowed: kaiming, normal, gaussian")
    backend = _layers_for(model, "add_lora")
    if adapted := backend.lora_layers(model):
        raise ConfigError(f"add_lora: {min(adapted)} has LoRA already. Use load_lora to give it other values")
    available = backend.linear_shapes(model)
    chosen: set[str] = set()
    for target in spec.targets:
        matches = {path for path in available if target == ALL_LINEAR or is_target(path, (target,))}
        if not matches:
            names = ", ".join(sorted({path.rpartition(".")[2] for path in available})) or "none"
            raise ConfigError(f"add_lora: targets: no linear layer is called '{target}'. The module has: {names}")
        chosen |= matches
    paths = sorted(chosen)
    backend.add_lora_layers(model, paths, spec, seed)
    return paths


def lora_tensors(model: Any) -> Tensors:
    """Return copies of A and B of a module with LoRA, float32, by their names in adapter files."""
    return {
        tensor_name(path, part): value
        for path, layer in _layers_for(model, "lora_tensors").lora_layers(model).items()
        for part, value in layer.factors().items()
    }


def load_lora(model: Any, tensors: Tensors) -> None:
    """Set A and B of a module with LoRA. ValueError unless names and shapes are those of `lora_tensors`."""
    layers = _layers_for(model, "load_lora").lora_layers(model)
    check_state({name: value.shape for name, value in lora_tensors(model).items()}, tensors, "load_lora")
    values: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for name, value in tensors.items():
        path, part = cast(tuple[str, str], parse_name(name))
        values[path][part] = value
    for path, layer in layers.items():
        layer.load_factors(values[path])


# ----------------------------------------------------------------------------------------------------------------------
# The backward pass of one layer.


def lora_backward(
    grad_out: Any,
    x: Any,
    lora_down: Any,
    lora_up: Any,
    scale: float,
    *,
    need_grad_x: bool = False,
    require_gpu: bool = False,
) -> tuple[Any, ...]:
    """Return (grad_down, grad_up), and with `need_grad_x` also grad_x, of y = scale · (x lora_downᵀ) lora_upᵀ.

    x [tokens, K] or [B, T, K]; grad_out likewise with N; lora_down [r, K]; lora_up [N, r]; float64, float32, bfloat16
    or float16, x and grad_out of the same dtype. Strides are free. A gradient has shape and dtype of its argument, is a
    new tensor and belongs to no graph: add it to `.grad`, or return it from a `torch.autograd.Function`.

    Raises ValueError with the name of an argument whose shape, dtype or device does not fit, TypeError for tensors that
    no backend computes with, and with `require_gpu` EnvironmentFault for tensors that are not on an NVIDIA GPU.
    """
    backend = _backend_for(grad_out.__class__, "lora_backward")
    if backend is None:
        raise TypeError(
            f"lora_backward: grad_out: got {_name_of(grad_out)}, allowed: tensors of a framework whose backend has "
            "this function"
        )
    return cast(LoRABackward, backend).lora_backward(
        grad_out, x, lora_down, lora_up, scale, need_grad_x=need_grad_x, require_gpu=require_gpu
    )


# ----------------------------------------------------------------------------------------------------------------------


def _layers_for(model: Any, function: str) -> LoRALayers:
    backend = _backend_for(model.__class__, "add_lora_layers")
    if backend is None:
        raise TypeError(
            f"{function}: got {_name_of(model)}, allowed: a module of a framework whose backend has LoRA layers"
        )
    return cast(LoRALayers, backend)


def _name_of(value: Any) -> str:
    return f"{value.__class__.__module__}.{value.__class__.__qualname__}"


@cache
def _backend_for(kind: type[Any], attribute: str) -> Any:
    """Return the backend of the framework that defines a class or what it inherits from, if it has this attribute.

    The class of the backend, not an object: that would choose a device for the whole process.
    """
    frameworks = {base.__module__.partition(".")[0] for base in kind.__mro__}
    for card in cards():
        if card.package.framework in frameworks:
            backend = backend_factory(card.name)
            if hasattr(backend, attribute):
                return backend
    return None
