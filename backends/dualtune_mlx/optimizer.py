"""The optimizers by name, as formulas on MLX arrays. MLX's own AdamW skips the bias correction by default.

All adapter tensors lie in one flat array, so that an update takes a few kernels instead of ten for each tensor. The
formulas fit arrays of any shape: applied tensor by tensor they are the plain version. What has none here is updated by
the core's formula as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from dualtune.engine.backend import CLIP_EPS
from dualtune.model.optimizer import OFFSET, Averaging, OptimizerSpec, RuleName, Run, Shapes
from dualtune.model.stochastic_rounding import UpdatePart, rounded, update_parts
from dualtune.model.update_rules import Settings, UpdateRule
from dualtune_mlx.card.memory import UPDATE_CHUNK
from dualtune_mlx.kernels import eight_bit
from dualtune_mlx.kernels.eight_bit import put_in_place

Arrays = dict[str, mx.array]
NORM_BLOCK = 1024  # squares are summed in blocks of this many: one long float32 sum would lose digits


class FlatLayout:
    """Where each named tensor lies in the flat array."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self._ends = np.cumsum([*self.sizes.values()]).tolist()
        self._where = {
            name: slice(end - self.sizes[name], end) for name, end in zip(self.sizes, self._ends, strict=True)
        }

    def flat(self, arrays: Mapping[str, mx.array]) -> mx.array:
        parts = [arrays[name].reshape(-1) for name in self.shapes]
        return mx.concatenate(parts) if parts else mx.zeros(0)

    def where(self, name: str) -> slice:
        """Return where a tensor lies in the flat array."""
        return self._where[name]

    def of(self, name: str, flat: mx.array) -> mx.array:
        """Return one tensor."""
        return flat[self._where[name]].reshape(self.shapes[name])

    def named(self, flat: mx.array) -> Arrays:
        parts = mx.split(flat, self._ends[:-1])  # one empty part if there is no adapter
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=False)}


def clip(grads: mx.array, max_norm: mx.array) -> tuple[mx.array, mx.array]:
    """Return (gradients scaled to a global L2 norm of at most `max_norm`, the norm before)."""
    norm = mx.sqrt(_sums_of_squares(grads).sum())
    return grads * mx.minimum(1.0, max_norm / (norm + CLIP_EPS)), norm


def clip_in_place(grads: mx.array, divisor: float, max_norm: mx.array) -> tuple[mx.array, mx.array]:
    """As `clip` of the gradients / `divisor`, chunk by chunk and in place."""
    chunks, sums = chunks_of(grads.size), list[mx.array]()
    for chunk in chunks:
        sums.append(_sums_of_squares(grads[chunk] / divisor))
        mx.eval(sums[-1])
    norm = mx.sqrt(mx.concatenate(sums).sum())
    factor = mx.minimum(1.0, max_norm / (norm + CLIP_EPS))
    for chunk in chunks:
        grads = put_in_place(grads, chunk, grads[chunk] / divisor * factor)
    return grads, norm


def _sums_of_squares(values: mx.array) -> mx.array:
    blocks = mx.pad(mx.square(values), (0, -values.size % NORM_BLOCK)).reshape(-1, NORM_BLOCK)
    return blocks.sum(axis=1)


def chunks_of(size: int) -> list[slice]:
    """Return the chunks of a flat array of this size."""
    return [slice(start, min(start + UPDATE_CHUNK, size)) for start in range(0, size, UPDATE_CHUNK)]


def one_minus_power(beta: float, step: mx.array) -> mx.array:
    """1 − beta^step in float32, exact to 2e-7. A plain subtraction would be 2e-5 off in early steps."""
    return -mx.expm1(step * math.log(beta))


class ArrayUpdateRule(Protocol):
    """Returns (params, slots) after update number `step`, counted from 1. `shrink` = 1 − lr · decay, which the host
    computes with more digits."""

    def __call__(
        self, params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, settings: Settings,
    ) -> tuple[mx.array, Arrays]: ...  # fmt: skip


def adamw(
    params: mx.array, slots: Arrays, grads: mx.array, *,
    step: mx.array, lr: mx.array, shrink: mx.array, settings: Settings,
) -> tuple[mx.array, Arrays]:  # fmt: skip
    """Loshchilov & Hutter, arXiv 1711.05101, algorithm 2."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    correction1, correction2 = one_minus_power(beta1, step), one_minus_power(beta2, step)
    m = beta1 * slots["m"] + (1 - beta1) * grads
    v = beta2 * slots["v"] + (1 - beta2) * mx.square(grads)
    denominator = mx.sqrt(v) / mx.sqrt(correction2) + settings["eps"]
    return params * shrink - (lr / correction1) * m / denominator, {"m": m, "v": v}


def adamw_root(
    params: mx.array, slots: Arrays, grads: mx.array, *,
    step: mx.array, lr: mx.array, shrink: mx.array, settings: Settings,
) -> tuple[mx.array, Arrays]:  # fmt: skip
    """`adamw` that keeps √v: `dualtune.model.update_rules.adamw_root`."""
    moments = {"m": slots["m"], "v": mx.square(slots["root_v"])}
    params, new = adamw(params, moments, grads, step=step, lr=lr, shrink=shrink, settings=settings)
    return params, {"m": new["m"], "root_v": mx.sqrt(new["v"])}


def sgd(
    params: mx.array, slots: Arrays, grads: mx.array, *,
    step: mx.array, lr: mx.array, shrink: mx.array, settings: Settings,
) -> tuple[mx.array, Arrays]:  # fmt: skip
    """Plain gradient descent."""
    return params * shrink - lr * grads, {}


def schedule_free(
    params: mx.array, slots: Arrays, grads: mx.array, *,
    step: mx.array, lr: mx.array, shrink: mx.array, settings: Settings,
) -> tuple[mx.array, Arrays]:  # fmt: skip
    """Defazio et al., arXiv 2405.15682, algorithm 1, in the form of `dualtune.model.update_rules.schedule_free`."""
    beta1, beta2, c = settings["beta1"], settings["beta2"], newest_share(step, settings["warmup_steps"])
    v = beta2 * slots["v"] + (1 - beta2) * mx.square(grads)
    denominator = mx.sqrt(v) / mx.sqrt(one_minus_power(beta2, step)) + settings["eps"]
    u = lr * grads / denominator + (lr * settings["weight_decay"]) * params
    d = slots["d"]
    return params + c * d - (1 - beta1 * (1 - c)) * u, {"d": (1 - c) * (d - beta1 * u), "v": v}


def newest_share(step: mx.array, warmup_steps: float) -> mx.array:
    """As `dualtune.model.update_rules.newest_share`. In float32: all terms are positive, so no digits cancel."""
    end, m = warmup_steps + 1, mx.minimum(step, warmup_steps)
    rising = (m / end) * ((m + 1) / end) * (2 * m + 1) / 6
    return mx.square(mx.minimum(1.0, step / end)) / (rising + mx.maximum(0.0, step - warmup_steps))


RULES: Mapping[RuleName, ArrayUpdateRule] = {
    "adamw": adamw, "adamw_8bit": adamw_root, "sgd": sgd, "schedule_free": schedule_free,
}  # fmt: skip


def of_the_core(rule: UpdateRule) -> ArrayUpdateRule:
    """Return a formula of the core as one of this file."""

    def update(
        params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, settings: Settings,
    ) -> tuple[mx.array, Arrays]:  # fmt: skip
        return rule(params, grads, slots, step=step, lr=lr, settings=settings, xp=mx)

    return update


class FlatOptimizer:
    """An optimizer of one flat array, whose slots are as the formula has them: float32."""

    lr_factors: np.ndarray = np.ones(())  # of the learning rate: one, or [runs]

    def __init__(self, spec: OptimizerSpec, shapes: Shapes, *, in_place: bool = False) -> None:
        """`in_place`: an update changes the arrays that it gets, and holds little beside them. Not in compiled code."""
        self._in_place, self._put = in_place, put_in_place if in_place else eight_bit.replaced
        self._names, self._settings = spec.entry.slots, spec.settings
        self._rule = RULES.get(spec.name) or of_the_core(spec.entry.update)
        self._sizes = [*map(math.prod, shapes.values())]

    def zero_slots(self) -> Arrays:
        """Return the arrays that hold the slots, before the first update."""
        return {slot: mx.zeros(sum(self._sizes)) for slot in self._names}

    def update(
        self, params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, is_good: mx.array,
    ) -> tuple[mx.array, Arrays]:  # fmt: skip
        """Return (params, slots) after update number `step`; if not `is_good`, the old ones."""
        new, new_slots = self._rule(params, slots, grads, step=step, lr=lr, shrink=shrink, settings=self._settings)
        chosen = {slot: mx.where(is_good, new_slots[slot], old) for slot, old in slots.items()}
        return mx.where(is_good, new, params), chosen

    def read(self, slots: Arrays) -> Arrays:
        """Return the values of each slot: float32, flat, in the order of the tensors of the flat array that have it."""
        return slots

    def load(self, values: Arrays, step: int) -> Arrays:
        """Return the arrays that hold slots with these flat float32 values after update `step`."""
        return values


class ByTensor(FlatOptimizer):
    """A formula that needs whole tensors: those of one shape are updated together, and have their slots together."""

    def __init__(self, spec: OptimizerSpec, shapes: Shapes, *, in_place: bool = False) -> None:
        super().__init__(spec, shapes, in_place=in_place)
        self._layout = FlatLayout(shapes)
        self._slot_layouts = {slot: FlatLayout(own) for slot, own in spec.slot_shapes(shapes).items() if slot != OFFSET}
        self._stacks = spec.stacks(shapes, UPDATE_CHUNK)

    def zero_slots(self) -> Arrays:
        return _numbered(
            [{slot: mx.zeros((len(stack.names), *own)) for slot, own in stack.slots.items()} for stack in self._stacks]
        )

    def update(
        self, params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, is_good: mx.array,
    ) -> tuple[mx.array, Arrays]:  # fmt: skip
        numbers = {"step": step, "lr": lr, "shrink": shrink, "is_good": is_good}
        if self._in_place:
            self._update_in_place(params, slots, grads, numbers)
            return params, slots
        weights, slopes = self._layout.named(params), self._layout.named(grads)
        after: list[Arrays] = []
        for i, stack in enumerate(self._stacks):
            w, g = (mx.stack([arrays[name] for name in stack.names]) for arrays in (weights, slopes))
            w, own = super().update(w, _of_number(slots, i), g, **numbers)
            weights |= zip(stack.names, w, strict=True)
            after.append(own)
        return self._layout.flat(weights), _numbered(after)

    def _update_in_place(self, params: mx.array, slots: Arrays, grads: mx.array, numbers: Arrays) -> None:
        for i, stack in enumerate(self._stacks):
            w, g = (mx.stack([self._layout.of(name, flat) for name in stack.names]) for flat in (params, grads))
            w, own = super().update(w, _of_number(slots, i), g, **numbers)
            mx.eval(w, own)
            for name, new in zip(stack.names, w, strict=True):
                put_in_place(params, self._layout.where(name), new.reshape(-1))
            slots |= _numbered_as(i, own)

    def read(self, slots: Arrays) -> Arrays:
        of_slots: dict[str, Arrays] = {slot: {} for slot in self._names}
        for i, stack in enumerate(self._stacks):
            for slot, values in _of_number(slots, i).items():
                of_slots[slot] |= zip(stack.names, values, strict=True)
        return {slot: layout.flat(of_slots[slot]) for slot, layout in self._slot_layouts.items()}

    def load(self, values: Arrays, step: int) -> Arrays:
        named = {slot: layout.named(values[slot]) for slot, layout in self._slot_layouts.items()}
        return _numbered(
            [{slot: mx.stack([named[slot][name] for name in stack.names]) for slot in stack.slots}
             for stack in self._stacks]
        )  # fmt: skip


class InChunks(FlatOptimizer):
    """An update of many weights in place, chunk by chunk."""

    def update(
        self, params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, is_good: mx.array,
    ) -> tuple[mx.array, Arrays]:  # fmt: skip
        for chunk in chunks_of(params.size):
            own = {slot: values[chunk] for slot, values in slots.items()}
            new, after = super().update(
                params[chunk], own, grads[chunk], step=step, lr=lr, shrink=shrink, is_good=is_good
            )
            mx.eval(new, after)
            for array, values in ((params, new), *((slots[slot], after[slot]) for slot in after)):
                put_in_place(array, chunk, values)
        return params, slots


class EightBit(FlatOptimizer):
    """An optimizer with coded slots, updated in chunks: `dualtune.model.update_rules.coded`."""

    def __init__(self, spec: OptimizerSpec, shapes: Shapes, *, in_place: bool = False) -> None:
        super().__init__(spec, shapes, in_place=in_place)
        assert spec.entry.exact is not None
        self._rule = RULES.get(spec.name) or of_the_core(spec.entry.exact)

    def zero_slots(self) -> Arrays:
        return eight_bit.zero_slots(self._names, self._sizes)

    def update(
        self, params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, is_good: mx.array,
    ) -> tuple[mx.array, Arrays]:  # fmt: skip
        numbers = {"step": step, "lr": lr, "shrink": shrink, "settings": self._settings}
        for values, blocks in self._chunks():
            old = {slot: eight_bit.decode_slot(slots, slot, values, blocks) for slot in self._names}
            new, exact = self._rule(params[values], old, grads[values], **numbers)
            new = mx.where(is_good, new, params[values])
            # Values that were decoded have the same codes again, whatever the step.
            exact = {slot: mx.where(is_good, exact[slot], before) for slot, before in old.items()}
            if self._in_place:
                mx.eval(new, exact)
            params = self._put(params, values, new)
            for slot, values_of_slot in exact.items():
                slots = eight_bit.encode_slot(slots, slot, values_of_slot, values, blocks, step, self._put)
        return params, slots

    def read(self, slots: Arrays) -> Arrays:
        chunks = list(self._chunks())
        return {
            slot: mx.concatenate([mx.zeros(0), *(eight_bit.decode_slot(slots, slot, *chunk) for chunk in chunks)])
            for slot in self._names
        }

    def load(self, values: Arrays, step: int) -> Arrays:
        slots = self.zero_slots()
        for chunk in self._chunks():
            for slot, flat in values.items():
                slots = eight_bit.encode_slot(
                    slots, slot, flat[chunk[0]], *chunk, mx.array(float(step)), eight_bit.replaced
                )
        return slots

    def _chunks(self) -> Iterator[tuple[slice, slice]]:
        return eight_bit.chunks_of(self._sizes, UPDATE_CHUNK)


class Averaged(FlatOptimizer):
    """An optimizer that also keeps the offset of an average of the weights: `dualtune.model.optimizer`."""

    def __init__(self, inner: FlatOptimizer, layout: FlatLayout, average: Averaging) -> None:
        self._inner, self._average = inner, average
        self.lr_factors = inner.lr_factors
        self._size = sum(layout.sizes.values())

    def zero_slots(self) -> Arrays:
        return {**self._inner.zero_slots(), OFFSET: mx.zeros(self._size)}

    def update(
        self, params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, is_good: mx.array,
    ) -> tuple[mx.array, Arrays]:  # fmt: skip
        offset, inner = _without_offset(slots)
        before = mx.array(params)  # an update in place changes the other object
        new, new_slots = self._inner.update(params, inner, grads, step=step, lr=lr, shrink=shrink, is_good=is_good)
        # Without an update the difference is exactly zero, and a factor of one keeps the offset bitwise.
        factor = mx.where(is_good, 1 - self._share(step), 1.0)
        return new, {**new_slots, OFFSET: (offset - (new.astype(mx.float32) - before.astype(mx.float32))) * factor}

    def _share(self, step: mx.array) -> mx.array:
        """As `Averaging.share`."""
        counted = mx.maximum(1.0, step - self._average.start)  # up to the start as in the first one: all
        return mx.maximum(self._average.least, 1 / counted)

    def read(self, slots: Arrays) -> Arrays:
        offset, inner = _without_offset(slots)
        return {**self._inner.read(inner), OFFSET: offset}

    def load(self, values: Arrays, step: int) -> Arrays:
        offset, inner = _without_offset(values)
        return {**self._inner.load(inner, step), OFFSET: offset}


def _without_offset(slots: Arrays) -> tuple[mx.array, Arrays]:
    return slots[OFFSET], {slot: array for slot, array in slots.items() if slot != OFFSET}


class InRuns(FlatOptimizer):
    """An optimizer for each run of the flat array, with the run's own learning rate. Each run has its own slots."""

    def __init__(self, spec: OptimizerSpec, runs: Sequence[Run], in_place: bool) -> None:
        self._inner = [_of_run(spec, run.shapes, in_place=in_place) for run in runs]
        self.lr_factors = np.array([run.lr_factor for run in runs])
        self._ends = _ends_of([run.shapes for run in runs])
        by_run = [spec.slot_shapes(run.shapes) for run in runs]
        self._slot_ends = {slot: _ends_of([shapes[slot] for shapes in by_run]) for slot in spec.entry.slots}

    def zero_slots(self) -> Arrays:
        return _numbered([inner.zero_slots() for inner in self._inner])

    def update(
        self, params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, is_good: mx.array,
    ) -> tuple[mx.array, Arrays]:  # fmt: skip
        """`lr` and `shrink` have a value for each run."""
        runs = zip(self._inner, mx.split(params, self._ends), mx.split(grads, self._ends), strict=True)
        new = [
            inner.update(w, _of_number(slots, i), g, step=step, lr=lr[i], shrink=shrink[i], is_good=is_good)
            for i, (inner, w, g) in enumerate(runs)
        ]
        return mx.concatenate([w for w, _ in new]), _numbered([after for _, after in new])

    def read(self, slots: Arrays) -> Arrays:
        parts = [inner.read(_of_number(slots, i)) for i, inner in enumerate(self._inner)]
        return {slot: mx.concatenate([part[slot] for part in parts]) for slot in parts[0]}

    def load(self, values: Arrays, step: int) -> Arrays:
        parts = {slot: mx.split(flat, self._slot_ends[slot]) for slot, flat in values.items()}
        return _numbered(
            [inner.load({slot: part[i] for slot, part in parts.items()}, step) for i, inner in enumerate(self._inner)]
        )


class StochasticallyRounded(InRuns):
    """An optimizer of a flat array in bfloat16 that computes in float32, one part at a time.

    See `dualtune.model.stochastic_rounding`.
    """

    def __init__(self, spec: OptimizerSpec, parts: Sequence[UpdatePart], seed: int) -> None:
        super().__init__(spec, [part.run for part in parts], in_place=False)
        self._seed, self._pieces = seed, [part.pieces for part in parts]

    def update(
        self, params: mx.array, slots: Arrays, grads: mx.array, *,
        step: mx.array, lr: mx.array, shrink: mx.array, is_good: mx.array,
    ) -> tuple[mx.array, Arrays]:  # fmt: skip
        start = 0
        for i, (inner, pieces) in enumerate(zip(self._inner, self._pieces, strict=True)):
            where = slice(start, start := start + sum(size for _, size in pieces))
            w, g = params[where].astype(mx.float32), grads[where]
            w, after = inner.update(w, _of_number(slots, i), g, step=step, lr=lr[i], shrink=shrink[i], is_good=is_good)
            elements = mx.concatenate([mx.arange(size, dtype=mx.int32) + first for first, size in pieces])
            w = rounded(w, elements, step.astype(mx.int32), self._seed, mx).astype(mx.bfloat16)
            mx.eval(w, after)
            put_in_place(params, where, w)
            slots |= _numbered_as(i, after)
        return params, slots


def _ends_of(runs: Sequence[Shapes]) -> list[int]:
    """Return where all runs but the last one end, in a flat array of their tensors."""
    return np.cumsum([sum(map(math.prod, shapes.values())) for shapes in runs])[:-1].tolist()


def _numbered(runs: Sequence[Arrays]) -> Arrays:
    """Return the slots of all runs, named such as `1.m`."""
    return {name: array for i, slots in enumerate(runs) for name, array in _numbered_as(i, slots).items()}


def _numbered_as(i: int, slots: Arrays) -> Arrays:
    return {f"{i}.{name}": array for name, array in slots.items()}


def _of_number(slots: Arrays, i: int) -> Arrays:
    return {name.removeprefix(f"{i}."): array for name, array in slots.items() if name.startswith(f"{i}.")}


def flat_optimizer(
    spec: OptimizerSpec, layout: FlatLayout, *, in_place: bool = False, rounding_seed: int | None = None
) -> FlatOptimizer:
    """Return the optimizer of a flat array with this layout. `in_place`: it is large, and memory counts.

    `rounding_seed`: of an array in bfloat16.
    """
    runs = spec.runs(layout.shapes)
    is_one = all(run.lr_factor == 1 for run in runs)
    if rounding_seed is not None:
        inner = StochasticallyRounded(spec, update_parts(spec, layout.shapes, UPDATE_CHUNK), rounding_seed)
    else:
        inner = _of_run(spec, layout.shapes, in_place=in_place) if is_one else InRuns(spec, runs, in_place)
    return inner if spec.average is None else Averaged(inner, layout, spec.average)


def _of_run(spec: OptimizerSpec, shapes: Shapes, *, in_place: bool) -> FlatOptimizer:
    if spec.entry.exact is not None:
        return EightBit(spec, shapes, in_place=in_place)
    if spec.entry.by_tensor is not None:
        return ByTensor(spec, shapes, in_place=in_place)
    return (InChunks if in_place else FlatOptimizer)(spec, shapes, in_place=in_place)
