"""The optimizers by name: torch's fused kernels, each of which updates the flat buffer of the adapter in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualtune.optimizer import OptimizerName, OptimizerSpec, Settings


class Fused(NamedTuple):
    """torch's version of an optimizer in the core's table."""

    make: Callable[[Tensor, Settings], torch.optim.Optimizer]
    slots: Mapping[str, str]  # the core's names of its state, and torch's


class _CountingSgd(torch.optim.SGD):
    """torch's SGD with a count of updates on the device, which only torch's AdamW has."""

    found_inf: Tensor

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        (state,) = self.state.values()
        state["step"] += 1 - self.found_inf


def _adamw(flat: Tensor, settings: Settings) -> torch.optim.Optimizer:
    betas = (settings["beta1"], settings["beta2"])
    return torch.optim.AdamW(
        [flat], betas=betas, eps=settings["eps"], weight_decay=settings["weight_decay"], fused=True
    )


def _sgd(flat: Tensor, settings: Settings) -> torch.optim.Optimizer:
    return _CountingSgd([flat], weight_decay=settings["weight_decay"], fused=True)


OPTIMIZERS: Mapping[OptimizerName, Fused] = {
    "adamw": Fused(_adamw, {"m": "exp_avg", "v": "exp_avg_sq"}),
    "sgd": Fused(_sgd, {}),
}


class FlatOptimizer:
    """An optimizer of one flat tensor, with its state in the core's names."""

    def __init__(self, flat: Tensor, spec: OptimizerSpec) -> None:
        make, names = OPTIMIZERS[spec.name]
        self._torch = make(flat, spec.settings)
        # torch creates it in the first step; here it may be read or restored before.
        self.count = torch.zeros((), device=flat.device)  # of updates
        self.slots = {slot: torch.zeros_like(flat) for slot in names}
        self._torch.state[flat] = {"step": self.count, **{names[slot]: tensor for slot, tensor in self.slots.items()}}

    def step(self, lr: float, is_good: Tensor) -> None:
        """Update the tensor by its gradient and zero the gradient. If `is_good` is false, only zero the gradient."""
        self._torch.param_groups[0]["lr"] = lr
        # The flag of torch's GradScaler: if it is 1, the fused kernels update nothing and undo the count.
        found_inf = (~is_good).float()
        self._torch.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]  torch declares it nowhere
        self._torch.step()
        self._torch.zero_grad(set_to_none=False)
