"""The optimizers by name, each of which updates the flat buffer of the adapter: torch's fused kernels, and our own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dualtune.model.optimizer import OFFSET, Averaging, OptimizerSpec, Run, Settings
from dualtune_torch.card.memory import UPDATE_CHUNK
from dualtune_torch.kernels.eight_bit import EightBitAdamW


class FlatOptimizer(Protocol):
    """An optimizer of one flat tensor, with its state in the core's names."""

    count: Tensor  # of updates, on the device

    def step(self, lr: float, is_good: Tensor) -> None:
        """Update the tensor by its gradient and zero the gradient. If `is_good` is false, only zero the gradient."""
        ...

    def read(self, slot: str) -> Tensor:
        """Return the values of a slot: flat, float32."""
        ...

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        """Replace the values of a slot. `fill` writes them into a flat float32 tensor. Set `count` before."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the slots."""
        ...


class _CountingSgd(torch.optim.SGD):
    """torch's SGD with a count of updates on the device, which only torch's AdamW has."""

    found_inf: Tensor

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        (state,) = self.state.values()
        state["step"] += 1 - self.found_inf


class PlainSlots:
    """The state of an optimizer whose slots are float32 tensors in the size of the flat one."""

    def __init__(self, flat: Tensor, slots: Iterable[str]) -> None:
        self.count = torch.zeros((), device=flat.device)
        self._slots = {slot: torch.zeros_like(flat) for slot in slots}

    def read(self, slot: str) -> Tensor:
        return self._slots[slot]

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        fill(self._slots[slot])

    def tensors(self) -> Iterator[Tensor]:
        yield from self._slots.values()


class FusedOptimizer(PlainSlots):
    """One of torch's, with a single parameter."""

    TORCH_NAMES: ClassVar[Mapping[str, str]] = {"m": "exp_avg", "v": "exp_avg_sq"}  # of the slots

    def __init__(self, flat: Tensor, spec: OptimizerSpec) -> None:
        super().__init__(flat, spec.entry.slots)
        settings, decay = spec.settings, spec.settings["weight_decay"]
        if spec.name == "adamw":
            betas = settings["beta1"], settings["beta2"]
            self._torch = torch.optim.AdamW([flat], betas=betas, eps=settings["eps"], weight_decay=decay, fused=True)
        else:
            self._torch = _CountingSgd([flat], weight_decay=decay, fused=True)
        # torch creates it in the first step; here it may be read or restored before.
        state = {self.TORCH_NAMES[slot]: tensor for slot, tensor in self._slots.items()}
        self._torch.state[flat] = {"step": self.count, **state}

    def step(self, lr: float, is_good: Tensor) -> None:
        self._torch.param_groups[0]["lr"] = lr
        # The flag of torch's GradScaler: if it is 1, the fused kernels update nothing and undo the count.
        found_inf = (~is_good).float()
        self._torch.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]  torch declares it nowhere
        self._torch.step()
        self._torch.zero_grad(set_to_none=False)


class ScheduleFreeAdamW(PlainSlots):
    """Schedule-free AdamW, chunk by chunk: this bounds the temporaries, and on a CPU keeps them in its cache."""

    def __init__(self, flat: Tensor, spec: OptimizerSpec) -> None:
        super().__init__(flat, spec.entry.slots)
        self._flat, self._settings = flat, spec.settings
        self._chunk = UPDATE_CHUNK[flat.device.type]

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        assert self._flat.grad is not None
        numbers = _schedule_free_numbers(self.count, lr, self._settings)
        for start in range(0, self._flat.numel(), self._chunk):
            self._update(slice(start, start + self._chunk), *numbers, lr=lr, is_good=is_good)
        self.count += is_good
        self._flat.grad.zero_()

    def _update(self, chunk: slice, *numbers: Tensor, lr: float, is_good: Tensor) -> None:
        """Update a chunk. Its temporaries are freed before the next one."""
        assert self._flat.grad is not None
        tensors = (self._flat.detach(), self._flat.grad, self._slots["d"], self._slots["v"])
        w, g, d, v = (tensor[chunk] for tensor in tensors)
        new = _schedule_free_update(w, g, d, v, *numbers, lr=lr, settings=self._settings)
        for old, changed in zip((w, d, v), new, strict=True):
            old.copy_(torch.where(is_good, changed, old))


def _schedule_free_numbers(count: Tensor, lr: float, settings: Settings) -> tuple[Tensor, ...]:
    """Return (√(1 − β2^step), c, (1 − β1·(1 − c))·lr, 1 − c) of the step after `count` updates.

    They stay on the device, in float64, so that no step waits for a count.
    """
    step = count.double() + 1
    root, c = torch.expm1(step * math.log(settings["beta2"])).neg().sqrt(), newest_share(step, settings)
    return root.float(), c.float(), ((1 - settings["beta1"] * (1 - c)) * lr).float(), (1 - c).float()


def newest_share(step: Tensor, settings: Settings) -> Tensor:
    """As `dualtune.model.optimizer.newest_share`, for a float64 tensor."""
    warmup = settings["warmup_steps"]
    m = step.clamp(max=warmup)
    rising = m * (m + 1) * (2 * m + 1) / 6 / (warmup + 1) ** 2
    return (step / (warmup + 1)).clamp(max=1).square() / (rising + (step - warmup).clamp(min=0))


def _schedule_free_update(
    w: Tensor, g: Tensor, d: Tensor, v: Tensor, root: Tensor, c: Tensor, rate: Tensor, kept: Tensor,
    *, lr: float, settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (w, d, v) after `dualtune.model.optimizer.schedule_free`. rate = (1 − β1·(1 − c))·lr, kept = 1 − c."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    new_v = (v * beta2).addcmul_(g, g, value=1 - beta2)
    u = new_v.sqrt().div_(root).add_(settings["eps"]).reciprocal_().mul_(g).add_(w, alpha=settings["weight_decay"])
    new_w = (d * c).add_(w).sub_(u * rate)
    new_d = u.mul_(-beta1 * lr).add_(d).mul_(kept)
    return new_w, new_d, new_v


class Averaged:
    """An optimizer that also keeps the offset of an average of the weights: `dualtune.model.optimizer`."""

    def __init__(self, inner: FlatOptimizer, flat: Tensor, average: Averaging) -> None:
        self._inner, self._flat, self._average = inner, flat, average
        self.count = inner.count
        self._offset = torch.zeros_like(flat)

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        before = self._flat.detach().clone()
        self._inner.step(lr, is_good)
        # Without an update both differences are exactly zero, and a factor of one keeps the offset bitwise.
        factor = torch.where(is_good, 1 - self._share(), 1.0)
        self._offset.add_(before.sub_(self._flat)).mul_(factor)

    def _share(self) -> Tensor:
        """As `Averaging.share` after the update that was counted last, on the device."""
        counted = (self.count - self._average.start).clamp(min=1)  # up to the start as in the first one: all
        return counted.reciprocal().clamp(min=self._average.least)

    def read(self, slot: str) -> Tensor:
        return self._offset if slot == OFFSET else self._inner.read(slot)

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        if slot == OFFSET:
            fill(self._offset)
        else:
            self._inner.load(slot, fill)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._inner.tensors()
        yield self._offset


class InRuns:
    """An optimizer for each run of a flat tensor, with the run's own learning rate."""

    def __init__(self, flat: Tensor, runs: Sequence[Run], spec: OptimizerSpec) -> None:
        assert flat.grad is not None
        self.count = torch.zeros((), device=flat.device)
        self._lengths = [sum(run.sizes) for run in runs]
        parts = flat.detach().split(self._lengths)
        for part, grad in zip(parts, flat.grad.split(self._lengths), strict=True):
            part.grad = grad
        self._inner = [(run.lr_factor, _of_run(part, run.sizes, spec)) for part, run in zip(parts, runs, strict=True)]

    def step(self, lr: float, is_good: Tensor) -> None:
        for factor, inner in self._inner:
            inner.count.copy_(self.count)
            inner.step(lr * factor, is_good)
        self.count += is_good

    def read(self, slot: str) -> Tensor:
        return torch.cat([inner.read(slot) for _, inner in self._inner])

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        flat = torch.empty(sum(self._lengths))
        fill(flat)
        for part, (_, inner) in zip(flat.split(self._lengths), self._inner, strict=True):
            inner.count.copy_(self.count)
            inner.load(slot, partial(_copy, part))

    def tensors(self) -> Iterator[Tensor]:
        for _, inner in self._inner:
            yield from inner.tensors()


def _copy(values: Tensor, into: Tensor) -> None:
    into.copy_(values)


def flat_optimizer(flat: Tensor, sizes: Mapping[str, int], spec: OptimizerSpec) -> FlatOptimizer:
    """Return the optimizer of a flat tensor that consists of tensors of these sizes, by name."""
    runs = spec.runs(sizes)
    is_one = all(run.lr_factor == 1 for run in runs)
    optimizer = _of_run(flat, [*sizes.values()], spec) if is_one else InRuns(flat, runs, spec)
    return optimizer if spec.average is None else Averaged(optimizer, flat, spec.average)


def _of_run(flat: Tensor, sizes: Sequence[int], spec: OptimizerSpec) -> FlatOptimizer:
    match spec.name:
        case "adamw_8bit":
            return EightBitAdamW(flat, sizes, spec)
        case "schedule_free":
            return ScheduleFreeAdamW(flat, spec)
        case "adamw" | "sgd":
            return FusedOptimizer(flat, spec)
