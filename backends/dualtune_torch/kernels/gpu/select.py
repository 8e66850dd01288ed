"""Which Triton kernels a model gets: where they can run, where bytes predict that they pay, and whether they are right.

| kernel | chosen, on an NVIDIA GPU | because |
|---|---|---|
| nf4_dequant, affine_dequant | always | one launch instead of three or seven, no matrix in between |
| lora_down, lora_dx, lora_da | with dropout, in 16 bits, from 2,048 features on | dropout(x), v A are not written |
| lora_back_g | in 16 bits, if `pays` says so for the sizes of the call | g is read once instead of twice |

DUALTUNE_KERNELS=torch takes none of them; =triton takes all that can run. Each is tried on the model before it is used,
against the code that it replaces. Without Triton this file can still be imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune_torch.card.memory import FEATURES_IN_REGISTERS
from dualtune_torch.kernels.trial import largest_gap
from dualtune_torch.lora import LoRALinear, drop_rule
from dualtune_torch.weights import nf4
from dualtune_torch.weights.affine import AffineLayer, Packed, dequantize
from dualtune_torch.weights.frozen import compute_dtype

VARIABLE, CHOICES = "DUALTUNE_KERNELS", ("auto", "triton", "torch")
DTYPES = (torch.bfloat16, torch.float16)  # of products: in float32, a kernel without TF32 would lose to cuBLAS
LEAST_CAPABILITY = (8, 0)  # of those that the kernels are compiled for ahead of time
TRIAL_TOKENS = 70  # not a multiple of any block
TRIAL_ROWS = 64
LARGEST_GAP = 2e-2  # of the largest number: sixteen bits round by a fifth of it, a wrong mask changes far more


def choice() -> str:
    """Return the value of DUALTUNE_KERNELS. Raises ConfigError for an unknown one."""
    value = os.environ.get(VARIABLE) or CHOICES[0]
    if value not in CHOICES:
        raise ConfigError(f"{VARIABLE}: got {value!r}, allowed: {', '.join(CHOICES)}. Unset it to let dualtune choose")
    return value


def why_not(device: torch.device) -> str | None:
    """Return why no Triton kernel is used on this device, or None. Raises ConfigError if they were asked for there."""
    asked = choice()
    if asked == "torch":
        return f"{VARIABLE}=torch"
    reason = _why_impossible(device)
    if reason and asked == "triton":
        raise ConfigError(f"{VARIABLE}: got triton, but {reason}. Set {VARIABLE}=auto, or torch")
    return reason


def _why_impossible(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}, and they are for NVIDIA GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, they need {LEAST_CAPABILITY[0]}.0"
    return None


# --- packed weights ---------------------------------------------------------------------------------------------------


def unpack_affine(model: PreTrainedModel) -> Pieces | None:
    """Unpack every affine layer by the kernel; None if there is none. Raises ValueError if a bit differs."""
    from dualtune_torch.kernels.gpu.affine_dequant import unpacked

    layers = [module for module in model.modules() if isinstance(module, AffineLayer)]
    for layer in _one_of_each(layers, model.device, lambda layer: (layer.shape, layer.bits)):
        some = Packed(*(tensor[:TRIAL_ROWS] for tensor in layer.packed))
        _compare_bits(unpacked(some), dequantize(some))
    for layer in layers:
        layer.unpack = unpacked
    return {} if layers else None


def unpack_nf4(model: PreTrainedModel) -> Pieces | None:
    """Unpack every NF4 layer in the usual layout by the kernel; returns and raises as `unpack_affine`."""
    from dualtune_torch.kernels.gpu.nf4_dequant import fits, reference, unpacked

    layers: list[Any] = [module for module in model.modules() if nf4.is_nf4(module)]
    layers = [layer for layer in layers if fits(layer.weight.quant_state)]
    for layer in _one_of_each(layers, model.device, lambda layer: layer.weight.quant_state.shape):
        codes, state = layer.weight.data, layer.weight.quant_state
        _compare_bits(unpacked(codes, state), reference(codes, state))
    for layer in layers:
        nf4.unpack_by(layer, unpacked)
    return {} if layers else None


def _one_of_each(layers: list[Any], device: torch.device, kind: Callable[[Any], Any]) -> Iterator[Any]:
    """The first layer of each kind that is on the device: those of a streamed base wait elsewhere."""
    return iter({kind(layer): layer for layer in reversed(layers) if layer.weight.device == device}.values())


def _compare_bits(actual: Tensor, expected: Tensor) -> None:
    if differing := int((actual != expected).sum()):
        raise ValueError(f"unpacks {differing} of {actual.numel()} weights differently")


# --- LoRA -------------------------------------------------------------------------------------------------------------


def masks_in_registers(model: PreTrainedModel) -> Pieces | None:
    """Return the three kernels of dropout, tried on the shapes of the model; None where they do not apply."""
    from dualtune_torch.kernels.gpu import lora_da, lora_down, lora_dx

    dtype, layers = compute_dtype(model), [layer for layer in _lora_layers(model) if layer.dropout]
    if dtype not in DTYPES or not layers:
        return None
    if choice() != "triton" and min(len(layer.keys_I) for layer in layers) < FEATURES_IN_REGISTERS:
        return None
    for layer in layers:
        in_dim, r = len(layer.keys_I), len(layer.lora_A)
        x, A, v = (
            _random(layer, *size, dtype=dtype) for size in ((TRIAL_TOKENS, in_dim), (r, in_dim), (TRIAL_TOKENS, r))
        )
        seeds = torch.arange(TRIAL_TOKENS, dtype=torch.int32, device=x.device) * 0x9E3779B
        mask = seeds, layer.keys_I, *drop_rule(layer.dropout)
        _compare(lora_down.lora_down(x, A, *mask), lora_down.reference(x, A, *mask))
        for kernel, plain, start, inputs in (
            (lora_dx.add_dx, lora_dx.reference, x, (v, A)),
            (lora_da.add_dA, lora_da.reference, A.float(), (v, x)),
        ):
            actual, expected = start.clone(), start.clone()
            kernel(actual, *inputs, *mask)
            plain(expected, *inputs, *mask)
            _compare(actual, expected)
    return {"down": lora_down.lora_down, "add_dx": lora_dx.add_dx, "add_dA": lora_da.add_dA}


def back_g_where_it_pays(model: PreTrainedModel) -> Pieces | None:
    """Return the kernel of g, tried on the shapes of the model, with its rule; None where it does not apply."""
    from dualtune_torch.kernels.gpu import lora_back_g

    dtype = compute_dtype(model)
    layers = [layer for layer in _lora_layers(model) if layer.lora_B.shape[1] <= lora_back_g.LARGEST_RANK]
    if dtype not in DTYPES or not layers:
        return None
    for layer in layers:
        out_dim, r = layer.lora_B.shape
        g, B, u = (
            _random(layer, *size, dtype=dtype) for size in ((TRIAL_TOKENS, out_dim), (out_dim, r), (TRIAL_TOKENS, r))
        )
        results = []
        for function in (lora_back_g.back_g, lora_back_g.reference):
            results.append((torch.empty_like(u), torch.zeros(out_dim, r, device=u.device)))
            function(g, B, u, layer.scale, *results[-1])
        for actual, expected in zip(*results, strict=True):
            _compare(actual, expected)
    return {"back_g": back_g}


def back_g(g_MO: Tensor, B_Or: Tensor, u_Mr: Tensor, scale: float, v_Mr: Tensor, dB_Or: Tensor) -> None:
    """`lora_back_g` by the kernel where it pays."""
    from dualtune_torch.kernels.gpu import lora_back_g

    function = lora_back_g.back_g if back_g_pays(g_MO, B_Or.shape[1]) else lora_back_g.reference
    function(g_MO, B_Or, u_Mr, scale, v_Mr, dB_Or)


def back_g_pays(g_MO: Tensor, r: int) -> bool:
    """Return whether one pass over g is predicted to pay on its GPU, or DUALTUNE_KERNELS=triton asks for it."""
    from dualtune_torch.kernels.gpu.lora_back_g import LARGEST_RANK, pays

    if g_MO.dtype not in DTYPES or r > LARGEST_RANK:
        return False
    M, out_dim = g_MO.shape
    return choice() == "triton" or pays(M, out_dim, r, torch.cuda.get_device_properties(g_MO.device).L2_cache_size)


def _lora_layers(model: nn.Module) -> list[LoRALinear]:
    """One LoRA layer of each shape."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    return list({(layer.lora_A.shape, layer.lora_B.shape): layer for layer in layers}.values())


def _random(layer: LoRALinear, *size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*size, generator=generator).to(layer.lora_A.device, dtype)


def _compare(actual: Tensor, expected: Tensor) -> None:
    if not (gap := largest_gap(actual, expected)) <= LARGEST_GAP:  # also true for NaN
        raise ValueError(f"computes something else (by {gap:.1e} of the largest number)")


Pieces = dict[str, Callable[..., Any]]  # fields of LoRAPieces; empty for kernels that were installed in the layers
KERNELS: dict[str, Callable[[PreTrainedModel], Pieces | None]] = {
    "nf4_dequant": unpack_nf4,
    "affine_dequant": unpack_affine,
    "lora_down, lora_dx, lora_da": masks_in_registers,
    "lora_back_g": back_g_where_it_pays,
}
