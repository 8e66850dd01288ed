"""The backward pass of one LoRA layer as a function: `dualtune.engine.kernels.lora_backward` on tensors of torch.

Formula, with x the layer's input, g the gradient of its output, A = lora_down and B = lora_up (Hu et al., LoRA,
arXiv 2106.09685):

    y = s · (x Aᵀ) Bᵀ      v = s · g B      dB = s · gᵀ (x Aᵀ)      dA = vᵀ x      dx = v A

These five products take 2·M·r·(2·N + 3·K) operations; through r first, because r is far smaller than N and K.

Legend: M tokens, K input features, N output features, r rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dualtune.base.errors import EnvironmentFault
from dualtune_torch.kernels.gpu import select

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *SIXTEEN_BITS)


def lora_backward(
    grad_out: Tensor,
    x: Tensor,
    lora_down: Tensor,
    lora_up: Tensor,
    scale: float,
    *,
    need_grad_x: bool = False,
    require_gpu: bool = False,
) -> tuple[Tensor, ...]:
    """See `dualtune.engine.kernels.lora_backward`. Computed in the dtype of grad_out, on its device and current stream.

    In 16 bits, x Aᵀ and v stay in float32: each gradient is rounded once, when it is returned. Nothing synchronizes
    the device, and nothing is kept after the call.
    """
    if require_gpu:
        _check_gpu(grad_out.device)
    _check(grad_out, x, lora_down, lora_up)
    with torch.no_grad():
        g_MN, x_MK = grad_out.reshape(-1, len(lora_up)), x.reshape(-1, x.shape[-1])
        down_rK, up_Nr = lora_down.to(g_MN.dtype), lora_up.to(g_MN.dtype)
        v_Mr, grad_up_Nr = _back_g(g_MN, up_Nr, _wide_product(x_MK, down_rK.T), scale)
        grad_down_rK = _times_narrow(x_MK.T, v_Mr).T.contiguous()
        grads = grad_down_rK.to(lora_down.dtype), grad_up_Nr.to(lora_up.dtype)
        return (*grads, _narrow_times(v_Mr, down_rK).view(x.shape)) if need_grad_x else grads


def _back_g(g_MN: Tensor, up_Nr: Tensor, u_Mr: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (v, dB) in float32 or float64: by the Triton kernel where it runs and pays, else by two products."""
    if select.why_not(g_MN.device) or not select.back_g_pays(g_MN, up_Nr.shape[1]):
        return _wide_product(g_MN, up_Nr).mul_(scale), _times_narrow(g_MN.T, u_Mr).mul_(scale)
    v_Mr, grad_up_Nr = torch.empty_like(u_Mr), torch.zeros_like(up_Nr, dtype=u_Mr.dtype)
    select.back_g(g_MN, up_Nr, u_Mr, scale, v_Mr, grad_up_Nr)
    return v_Mr, grad_up_Nr


# --- products that round nothing to 16 bits but a result that is returned ---------------------------------------------


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32 for matrices of 16 bits, else in their dtype."""
    if a.dtype not in SIXTEEN_BITS:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _times_narrow(a: Tensor, narrow_Mr: Tensor) -> Tensor:
    """Return a · narrow, where narrow is wider in bits, and so little that it may be two numbers of a's dtype each."""
    if a.dtype not in SIXTEEN_BITS:
        return a @ narrow_Mr
    return _wide_product(a, _halves(narrow_Mr, a.dtype)).unflatten(1, (2, -1)).sum(1)


def _narrow_times(narrow_Mr: Tensor, b: Tensor) -> Tensor:
    """Return narrow · b in the dtype of b, rounded once: both halves are added inside of one product."""
    if b.dtype not in SIXTEEN_BITS:
        return narrow_Mr @ b
    return _halves(narrow_Mr, b.dtype) @ torch.cat((b, b))


def _halves(wide_Mr: Tensor, dtype: torch.dtype) -> Tensor:
    """Write float32 numbers [M, r] as 16 bits and what these leave out: [M, 2r]."""
    high_Mr = wide_Mr.to(dtype)
    return torch.cat((high_Mr, (wide_Mr - high_Mr).to(dtype)), dim=1)


# --- errors -----------------------------------------------------------------------------------------------------------


def _check_gpu(device: torch.device) -> None:
    if device.type == "cuda":
        return
    if torch.cuda.is_available():
        raise EnvironmentFault(
            f"lora_backward: require_gpu=True, but grad_out is on {device}. Move the arguments to an NVIDIA GPU: "
            "tensor.to('cuda')"
        )
    raise EnvironmentFault(
        f"lora_backward: require_gpu=True, but grad_out is on {device}, and torch {torch.__version__} sees no NVIDIA "
        "GPU. Run: dualtune check-gpu, or leave out require_gpu to compute on the CPU"
    )


def _check(grad_out: Tensor, x: Tensor, lora_down: Tensor, lora_up: Tensor) -> None:
    """Raise ValueError, with the name of the argument, for what does not fit together."""
    tensors = {"grad_out": grad_out, "x": x, "lora_down": lora_down, "lora_up": lora_up}
    for name, tensor in tensors.items():
        allowed = (2, 3) if name in ("grad_out", "x") else (2,)
        if tensor.ndim not in allowed:
            dims = " or ".join(map(str, allowed))
            raise ValueError(
                f"lora_backward: {name}: got {_shape(tensor.shape)}, allowed: a tensor of {dims} dimensions"
            )
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"lora_backward: {name}: got {tensor.dtype}, allowed: {names}")
        if tensor.device != grad_out.device:
            raise ValueError(
                f"lora_backward: {name}: got a tensor on {tensor.device}, allowed: {grad_out.device}, as grad_out"
            )
    r, K = lora_down.shape
    _check_shape(
        "lora_up", lora_up, (len(lora_up), r), f"[N, r], with r = {r} as in lora_down {_shape(lora_down.shape)}"
    )
    _check_shape("x", x, (*x.shape[:-1], K), f"[…, K], with K = {K} as in lora_down {_shape(lora_down.shape)}")
    N = len(lora_up)
    like = f"the tokens of x {_shape(x.shape)}, then N = {N} as in lora_up {_shape(lora_up.shape)}"
    _check_shape("grad_out", grad_out, (*x.shape[:-1], N), like)
    if x.dtype != grad_out.dtype:
        raise ValueError(f"lora_backward: x: got {x.dtype}, allowed: {grad_out.dtype}, as grad_out")


def _check_shape(name: str, tensor: Tensor, allowed: Sequence[int], meaning: str) -> None:
    if tuple(tensor.shape) != tuple(allowed):
        raise ValueError(f"lora_backward: {name}: got {_shape(tensor.shape)}, allowed: {_shape(allowed)}: {meaning}")


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# ----------------------------------------------------------------------------------------------------------------------
# `dualtune bench lora-backward` on torch: the function beside autograd, in turns.

SCALE = 2.0
CALLS = {"cuda": 20, "cpu": 1}  # of a round, with one wait at its end: a launch takes less time than a wait
WARM_UP = 3  # rounds


def time_lora_backward(
    device: torch.device, batch: int, tokens: int, features: int, rank: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of one call in each round, by name; on a GPU also those of autograd on the CPU."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        """Return grad_out, x, lora_down and lora_up in float32."""
        generator = torch.Generator().manual_seed(0)
        shapes = ((batch, tokens, features), (batch, tokens, features), (rank, features), (features, rank))
        return tuple(torch.randn(*shape, generator=generator).to(device) for shape in shapes)

    grad_out, x, down, up = inputs(device)
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: lora_backward(grad_out, x, down, up, SCALE, need_grad_x=True),
        "autograd": _autograd(inputs(device)),
    }
    seconds = _in_turns(works, device, rounds)
    if device.type == "cuda":
        cpu = torch.device("cpu")
        seconds |= _in_turns({"autograd on the CPU": _autograd(inputs(cpu))}, cpu, rounds)
    return seconds


def _in_turns(works: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(WARM_UP + rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            _wait(device)
            began = time.perf_counter()
            for _ in range(CALLS[device.type]):
                works[name]()
            _wait(device)
            seconds[name].append((time.perf_counter() - began) / CALLS[device.type])
    return {name: rounds[WARM_UP:] for name, rounds in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _autograd(inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Forward and backward pass: ours computes x Aᵀ too, which autograd has from the forward pass."""
    grad_out, *leaves = inputs
    x, down, up = (leaf.requires_grad_() for leaf in leaves)
    return lambda: torch.autograd.grad(SCALE * (x @ down.T) @ up.T, (x, down, up), grad_out)
