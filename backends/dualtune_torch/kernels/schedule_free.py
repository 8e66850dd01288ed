"""Schedule-free AdamW (`dualtune.optimizer.schedule_free`) for one flat tensor, chunk by chunk.

Chunks bound the temporaries, and on a CPU keep them in its cache. What depends on the number of updates stays on the
device, in float64, so that no step waits for a count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dualtune.optimizer import OptimizerSpec, Settings
from dualtune_torch.card.sizes import UPDATE_CHUNK


class ScheduleFreeAdamW:
    """See `dualtune_torch.optimizer.FlatOptimizer`."""

    def __init__(self, flat: Tensor, spec: OptimizerSpec) -> None:
        self._flat, self._settings = flat, spec.settings
        self._chunk = UPDATE_CHUNK[flat.device.type]
        self.count = torch.zeros((), device=flat.device)
        self._slots = {slot: torch.zeros_like(flat) for slot in spec.entry.slots}

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        assert self._flat.grad is not None
        numbers = self._numbers(lr)
        tensors = (self._flat.detach(), self._flat.grad, self._slots["d"], self._slots["v"])
        for start in range(0, self._flat.numel(), self._chunk):
            chunk = slice(start, start + self._chunk)
            w, g, d, v = (tensor[chunk] for tensor in tensors)
            for old, new in zip((w, d, v), updated(w, g, d, v, *numbers, lr=lr, settings=self._settings), strict=True):
                old.copy_(torch.where(is_good, new, old))
        self.count += is_good
        self._flat.grad.zero_()

    def _numbers(self, lr: float) -> tuple[Tensor, ...]:
        """Return (√(1 − β2^step), c, (1 − β1·(1 − c))·lr, 1 − c), on the device."""
        settings, step = self._settings, self.count.double() + 1
        root, c = torch.expm1(step * math.log(settings["beta2"])).neg().sqrt(), newest_share(step, settings)
        return root.float(), c.float(), ((1 - settings["beta1"] * (1 - c)) * lr).float(), (1 - c).float()

    def read(self, slot: str) -> Tensor:
        return self._slots[slot]

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        fill(self._slots[slot])

    def tensors(self) -> Iterator[Tensor]:
        yield from self._slots.values()


def newest_share(step: Tensor, settings: Settings) -> Tensor:
    """As `dualtune.optimizer.newest_share`, for a float64 tensor."""
    warmup = settings["warmup_steps"]
    m = step.clamp(max=warmup)
    rising = m * (m + 1) * (2 * m + 1) / 6 / (warmup + 1) ** 2
    return (step / (warmup + 1)).clamp(max=1).square() / (rising + (step - warmup).clamp(min=0))


def updated(
    w: Tensor, g: Tensor, d: Tensor, v: Tensor, root: Tensor, c: Tensor, rate: Tensor, kept: Tensor,
    *, lr: float, settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (w, d, v) after an update. rate = (1 − β1·(1 − c))·lr, kept = 1 − c."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    new_v = (v * beta2).addcmul_(g, g, value=1 - beta2)
    u = new_v.sqrt().div_(root).add_(settings["eps"]).reciprocal_().mul_(g).add_(w, alpha=settings["weight_decay"])
    new_w = (d * c).add_(w).sub_(u * rate)
    new_d = u.mul_(-beta1 * lr).add_(d).mul_(kept)
    return new_w, new_d, new_v
