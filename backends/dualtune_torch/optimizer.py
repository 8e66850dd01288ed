"""The optimizers by name, each of which updates the flat buffer of the adapter.

Torch's fused kernels, our own, and for what has neither the formulas of the core as they stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dualtune.model.optimizer import OFFSET, Averaging, OptimizerSpec, Run, Shapes
from dualtune.model.stochastic_rounding import rounded, update_parts
from dualtune.model.update_rules import Settings
from dualtune_torch.card.memory import UPDATE_CHUNK
from dualtune_torch.kernels.eight_bit import EightBitAdamW, EightBitLion


class FlatOptimizer(Protocol):
    """An optimizer of one flat tensor, with its state in the core's names."""

    count: Tensor  # of updates, on the device

    def step(self, lr: float, is_good: Tensor) -> None:
        """Update the tensor by its gradient and zero the gradient. If `is_good` is false, only zero the gradient."""
        ...

    def read(self, slot: str) -> Tensor:
        """Return the values of a slot: float32, flat, in the order of the tensors of the flat one that have it."""
        ...

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        """Replace the values of a slot. `fill` writes them into a tensor as `read` returns. Set `count` before."""
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


class InChunks(PlainSlots):
    """A formula of the core, chunk by chunk: this bounds the temporaries, and on a CPU keeps them in its cache."""

    def __init__(self, flat: Tensor, spec: OptimizerSpec) -> None:
        super().__init__(flat, spec.entry.slots)
        self._flat, self._spec, self._settings = flat, spec, spec.settings
        self._chunk = UPDATE_CHUNK[flat.device.type]

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        assert self._flat.grad is not None
        update = self._update_of(self.count, lr)
        for start in range(0, self._flat.numel(), self._chunk):
            chunk = slice(start, start + self._chunk)
            w, g, slots = self._flat.detach()[chunk], self._flat.grad[chunk], self._of(chunk)
            _replace(w, slots, update(w, g, slots), is_good)  # its temporaries are freed before the next chunk
        self.count += is_good
        self._flat.grad.zero_()

    def _of(self, chunk: slice) -> dict[str, Tensor]:
        return {slot: values[chunk] for slot, values in self._slots.items()}

    def _update_of(self, count: Tensor, lr: float) -> _Update:
        """Return the formula for the step after `count` updates."""
        return _formula(self._spec, count, lr)


_Update = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]


def _formula(spec: OptimizerSpec, count: Tensor, lr: float) -> _Update:
    """Return the core's formula for the step after `count` updates, which is a float64 number of the device there."""
    return partial(spec.entry.update, step=count.double() + 1, lr=lr, settings=spec.settings, xp=torch)


def _replace(w: Tensor, slots: Mapping[str, Tensor], new: tuple[Tensor, Mapping[str, Tensor]], is_good: Tensor) -> None:
    """Write weights and slots after an update in place of those before it, if it is good."""
    w.copy_(torch.where(is_good, new[0], w))
    for slot, before in slots.items():
        before.copy_(torch.where(is_good, new[1][slot], before))


class ScheduleFreeAdamW(InChunks):
    """Schedule-free AdamW in fewer operations than its formula."""

    def _update_of(self, count: Tensor, lr: float) -> _Update:
        numbers = _schedule_free_numbers(count, lr, self._settings)
        return partial(_schedule_free_update, numbers=numbers, lr=lr, settings=self._settings)


class ByTensor:
    """A formula of the core that needs whole tensors: those of one shape are updated together.

    Tensors that it does not need whole are updated in chunks if they are large.
    """

    def __init__(self, flat: Tensor, shapes: Shapes, spec: OptimizerSpec) -> None:
        assert flat.grad is not None
        self.count = torch.zeros((), device=flat.device)
        self._flat, self._spec = flat, spec
        sizes = [*map(math.prod, shapes.values())]
        self._weights, self._grads = (
            {name: part.view(shapes[name]) for name, part in zip(shapes, whole.split(sizes), strict=True)}
            for whole in (flat.detach(), flat.grad)
        )
        self._chunk = UPDATE_CHUNK[flat.device.type]
        self._stacks = spec.stacks(shapes, self._chunk)
        self._slots = [
            {slot: flat.new_zeros(len(stack.names), *shape) for slot, shape in stack.slots.items()}
            for stack in self._stacks
        ]

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        assert self._flat.grad is not None
        update = _formula(self._spec, self.count, lr)
        for stack, slots in zip(self._stacks, self._slots, strict=True):
            w, g = (_stacked([views[name] for name in stack.names]) for views in (self._weights, self._grads))
            if stack.is_whole or w.numel() <= self._chunk:
                _replace(w, slots, update(w, g, slots), is_good)
            else:
                self._replace_in_chunks(w.view(-1), g.view(-1), slots, update, is_good)
            if len(stack.names) > 1:
                for name, new in zip(stack.names, w, strict=True):
                    self._weights[name].copy_(new)
        self.count += is_good
        self._flat.grad.zero_()

    def _replace_in_chunks(
        self, w: Tensor, g: Tensor, slots: Mapping[str, Tensor], update: _Update, is_good: Tensor
    ) -> None:
        for start in range(0, w.numel(), self._chunk):
            chunk = slice(start, start + self._chunk)
            own = {slot: values.view(-1)[chunk] for slot, values in slots.items()}
            _replace(w[chunk], own, update(w[chunk], g[chunk], own), is_good)

    def read(self, slot: str) -> Tensor:
        parts = self._parts(slot)
        return torch.cat([parts[name] for name in self._weights if name in parts] or [self._flat.new_zeros(0)])

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        parts = self._parts(slot)
        names = [name for name in self._weights if name in parts]
        flat = torch.empty(sum(part.numel() for part in parts.values()))
        fill(flat)
        for name, values in zip(names, flat.split([parts[name].numel() for name in names]), strict=True):
            parts[name].copy_(values)

    def _parts(self, slot: str) -> dict[str, Tensor]:
        """Return views of a slot's tensors, flat, by name."""
        return {
            name: values.view(-1)
            for stack, slots in zip(self._stacks, self._slots, strict=True)
            if slot in slots
            for name, values in zip(stack.names, slots[slot], strict=True)
        }

    def tensors(self) -> Iterator[Tensor]:
        for slots in self._slots:
            yield from slots.values()


def _schedule_free_numbers(count: Tensor, lr: float, settings: Settings) -> tuple[Tensor, ...]:
    """Return (√(1 − β2^step), c, (1 − β1·(1 − c))·lr, 1 − c) of the step after `count` updates.

    They stay on the device, in float64, so that no step waits for a count.
    """
    step = count.double() + 1
    root, c = torch.expm1(step * math.log(settings["beta2"])).neg().sqrt(), newest_share(step, settings)
    return root.float(), c.float(), ((1 - settings["beta1"] * (1 - c)) * lr).float(), (1 - c).float()


def newest_share(step: Tensor, settings: Settings) -> Tensor:
    """As `dualtune.model.update_rules.newest_share`, for a float64 tensor."""
    warmup = settings["warmup_steps"]
    m = step.clamp(max=warmup)
    rising = m * (m + 1) * (2 * m + 1) / 6 / (warmup + 1) ** 2
    return (step / (warmup + 1)).clamp(max=1).square() / (rising + (step - warmup).clamp(min=0))


def _schedule_free_update(
    w: Tensor, g: Tensor, slots: Mapping[str, Tensor], *, numbers: tuple[Tensor, ...], lr: float, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (w, slots) after `dualtune.model.update_rules.schedule_free`, with `_schedule_free_numbers`."""
    beta1, beta2, (root, c, rate, kept) = settings["beta1"], settings["beta2"], numbers
    new_v = (slots["v"] * beta2).addcmul_(g, g, value=1 - beta2)
    u = new_v.sqrt().div_(root).add_(settings["eps"]).reciprocal_().mul_(g).add_(w, alpha=settings["weight_decay"])
    new_w = (slots["d"] * c).add_(w).sub_(u * rate)
    new_d = u.mul_(-beta1 * lr).add_(slots["d"]).mul_(kept)
    return new_w, {"d": new_d, "v": new_v}


class Averaged:
    """An optimizer that also keeps the offset of an average of the weights: `dualtune.model.optimizer`."""

    def __init__(self, inner: FlatOptimizer, flat: Tensor, average: Averaging) -> None:
        self._inner, self._flat, self._average = inner, flat, average
        self.count = inner.count
        self._offset = torch.zeros(flat.shape, device=flat.device)

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        before = self._flat.detach().clone()
        self._inner.step(lr, is_good)
        # Without an update both differences are exactly zero, and a factor of one keeps the offset bitwise.
        factor = torch.where(is_good, 1 - self._share(), 1.0)
        self._offset.add_(before.float().sub_(self._flat)).mul_(factor)

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
        parts = self._parts(flat.detach())
        for part, grad in zip(parts, flat.grad.split(self._lengths), strict=True):
            part.grad = grad
        self._inner = [(run.lr_factor, _of_run(part, run.shapes, spec)) for part, run in zip(parts, runs, strict=True)]
        shapes = [spec.slot_shapes(run.shapes) for run in runs]
        self._slot_lengths = {
            slot: [sum(map(math.prod, of_run[slot].values())) for of_run in shapes] for slot in spec.entry.slots
        }

    def _parts(self, flat: Tensor) -> Sequence[Tensor]:
        """Return what each run's optimizer updates."""
        return flat.split(self._lengths)

    def step(self, lr: float, is_good: Tensor) -> None:
        for factor, inner in self._inner:
            inner.count.copy_(self.count)
            inner.step(lr * factor, is_good)
        self.count += is_good

    def read(self, slot: str) -> Tensor:
        return torch.cat([inner.read(slot) for _, inner in self._inner])

    def load(self, slot: str, fill: Callable[[Tensor], None]) -> None:
        lengths = self._slot_lengths[slot]
        flat = torch.empty(sum(lengths))
        fill(flat)
        for part, (_, inner) in zip(flat.split(lengths), self._inner, strict=True):
            inner.count.copy_(self.count)
            inner.load(slot, partial(_copy, part))

    def tensors(self) -> Iterator[Tensor]:
        for _, inner in self._inner:
            yield from inner.tensors()


class StochasticallyRounded(InRuns):
    """An optimizer of a flat tensor in bfloat16: `dualtune.model.stochastic_rounding`.

    A part of it at a time is in float32, where its optimizer updates it as any other tensor.
    """

    def __init__(self, flat: Tensor, shapes: Shapes, spec: OptimizerSpec, seed: int) -> None:
        parts = update_parts(spec, shapes, UPDATE_CHUNK[flat.device.type])
        super().__init__(flat, [part.run for part in parts], spec)
        self._seed, self._pieces = seed, [part.pieces for part in parts]
        self._weights = flat.detach().split(self._lengths)
        self._numbers = torch.arange(max(self._lengths), dtype=torch.int32, device=flat.device)

    def _parts(self, flat: Tensor) -> Sequence[Tensor]:
        self._float32 = torch.zeros(max(self._lengths), device=flat.device)
        return [self._float32[:length] for length in self._lengths]

    @torch.no_grad()
    def step(self, lr: float, is_good: Tensor) -> None:
        number = (self.count + 1).int()
        for weights, pieces, (factor, inner) in zip(self._weights, self._pieces, self._inner, strict=True):
            updated = self._float32[: len(weights)]
            updated.copy_(weights)
            inner.count.copy_(self.count)
            inner.step(lr * factor, is_good)
            sizes = [size for _, size in pieces]
            for w, new, (first, size) in zip(weights.split(sizes), updated.split(sizes), pieces, strict=True):
                w.copy_(rounded(new, self._numbers[:size] + first, number, self._seed, torch))
        self.count += is_good


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as [K, *shape]; a single one is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack([*tensors])


def _copy(values: Tensor, into: Tensor) -> None:
    into.copy_(values)


def take_state(optimizer: FlatOptimizer, before: FlatOptimizer, slots: Iterable[str]) -> None:
    """Give an optimizer the slots and the count of another one of the same tensor."""
    optimizer.count.copy_(before.count)
    for slot in slots:
        optimizer.load(slot, partial(_copy, before.read(slot)))


def flat_optimizer(flat: Tensor, shapes: Shapes, spec: OptimizerSpec, seed: int = 0) -> FlatOptimizer:
    """Return the optimizer of a flat tensor that consists of tensors of these shapes, by name.

    `seed`: of the rounding of a tensor in bfloat16.
    """
    runs = spec.runs(shapes)
    if flat.dtype == torch.bfloat16:
        optimizer = StochasticallyRounded(flat, shapes, spec, seed)
    else:
        is_one = all(run.lr_factor == 1 for run in runs)
        optimizer = _of_run(flat, shapes, spec) if is_one else InRuns(flat, runs, spec)
    return optimizer if spec.average is None else Averaged(optimizer, flat, spec.average)


def _of_run(flat: Tensor, shapes: Shapes, spec: OptimizerSpec) -> FlatOptimizer:
    match spec.name:
        case "adamw_8bit":
            return EightBitAdamW(flat, [*map(math.prod, shapes.values())], spec)
        case "lion_8bit":
            return EightBitLion(flat, [*map(math.prod, shapes.values())], spec)
        case "schedule_free":
            return ScheduleFreeAdamW(flat, spec)
        case "adamw" | "sgd":
            return FusedOptimizer(flat, spec)
        case _:
            return ByTensor(flat, shapes, spec) if spec.entry.by_tensor is not None else InChunks(flat, spec)
