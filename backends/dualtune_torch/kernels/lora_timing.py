"""`dualtune bench lora-backward` on torch: the function beside autograd, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from dualtune_torch.kernels.lora_backward import lora_backward

SCALE = 2.0
CALLS = {"cuda": 20, "cpu": 1}  # of a round, with one wait at its end: a launch takes less time than a wait
WARM_UP = 3  # rounds


def time_lora_backward(
    device: torch.device, batch: int, tokens: int, features: int, rank: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of one call in each round, by name; on a GPU also those of autograd on the CPU."""
    works = {
        "ours": _ours(_inputs(device, batch, tokens, features, rank)),
        "autograd": _autograd(_inputs(device, batch, tokens, features, rank)),
    }
    seconds = _in_turns(works, device, rounds)
    if device.type == "cuda":
        cpu = torch.device("cpu")
        work = {"autograd on the CPU": _autograd(_inputs(cpu, batch, tokens, features, rank))}
        seconds |= _in_turns(work, cpu, rounds)
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
    return {name: each[WARM_UP:] for name, each in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _inputs(device: torch.device, batch: int, tokens: int, features: int, rank: int) -> tuple[Tensor, ...]:
    """grad_out, x, lora_down, lora_up in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, tokens, features), (batch, tokens, features), (rank, features), (features, rank))
    return tuple(torch.randn(*shape, generator=generator).to(device) for shape in shapes)


def _ours(inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    grad_out, x, down, up = inputs
    return lambda: lora_backward(grad_out, x, down, up, SCALE, need_grad_x=True)


def _autograd(inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Forward and backward pass: ours computes x Aᵀ too, which autograd has from the forward pass."""
    grad_out, *leaves = inputs
    x, down, up = (leaf.requires_grad_() for leaf in leaves)
    return lambda: torch.autograd.grad(SCALE * (x @ down.T) @ up.T, (x, down, up), grad_out)
