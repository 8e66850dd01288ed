"""The update of schedule-free AdamW (`dualtune.model.optimizer.schedule_free`) on tensors.

What depends on the number of updates stays on the device, in float64, so that no step waits for a count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualtune.model.optimizer import Settings


def numbers(count: Tensor, lr: float, settings: Settings) -> tuple[Tensor, ...]:
    """Return (√(1 − β2^step), c, (1 − β1·(1 − c))·lr, 1 − c) of the step after `count` updates, on the device."""
    step = count.double() + 1
    root, c = torch.expm1(step * math.log(settings["beta2"])).neg().sqrt(), newest_share(step, settings)
    return root.float(), c.float(), ((1 - settings["beta1"] * (1 - c)) * lr).float(), (1 - c).float()


def newest_share(step: Tensor, settings: Settings) -> Tensor:
    """As `dualtune.model.optimizer.newest_share`, for a float64 tensor."""
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
