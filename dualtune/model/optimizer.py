"""Optimizers as data: for each, what the config, the checkpoint, the memory estimate and every backend know of it.

The formulas are in `update_rules.py`.

The weights w that an optimizer trains need not be those that a run evaluates and writes. What the latter, its RESULT,
are is part of the entry, and `Averaging` adds an average to any entry (decision 0027).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from dualtune.base.errors import ConfigError
from dualtune.base.plugins import points_of, registered
from dualtune.model import update_rules
from dualtune.model.update_rules import ResultRule, Settings, UpdateRule

if TYPE_CHECKING:
    import numpy as np

OptimizerName = Literal[
    "adamw", "adamw_8bit", "sgd", "lion", "lion_8bit", "adafactor", "muon"
]  # as train.optimizer has them
# As the table has them: train.schedule may choose schedule_free, and other packages have entries too.
RuleName = str
OPTIMIZERS_GROUP = "dualtune.optimizers"  # of entry points
SLOT_BYTES = 4.0  # slots are float32 whatever the model computes in, unless the entry says otherwise

EIGHT_BIT_BYTES = 1 + 2 / 256  # a code for each value, and an int16 for each 256 values (`eight_bit.py`)

TensorShape = tuple[int, ...]
Shapes = Mapping[str, TensorShape]  # of tensors, by name
Slots = Mapping[str, "np.ndarray"]  # of one tensor


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An entry of the table of optimizers."""

    update: UpdateRule
    slots: tuple[str, ...]  # its state: tensors with the names of what is trained, zero before the first update
    defaults: Settings  # its hyperparameters except the learning rate, which the schedule gives
    slot_bytes: float = SLOT_BYTES  # in memory, for each value of a slot. Checkpoints have float32
    result: ResultRule | None = None  # None: the result is w itself
    # Whether the formula needs a tensor of this name and shape as a whole. None: it computes number by number.
    by_tensor: Callable[[str, TensorShape], bool] | None = None
    # The slots that a tensor of this name and shape has, with their shapes. None: all, in the shape of the tensor.
    shapes: Callable[[str, TensorShape], Mapping[str, TensorShape]] | None = None
    exact: UpdateRule | None = None  # the formula of slots in 8-bit codes, before they are rounded

    def slots_of(self, name: str, shape: TensorShape) -> Mapping[str, TensorShape]:
        """Return the slots of a tensor, with their shapes."""
        return dict.fromkeys(self.slots, shape) if self.shapes is None else self.shapes(name, shape)

    def bytes_of(self, name: str, shape: TensorShape) -> float:
        """Return the bytes of a tensor's state in memory."""
        return self.slot_bytes * sum(map(math.prod, self.slots_of(name, shape).values()))

    @property
    def most_per_weight(self) -> int:
        """How many values of state there are for a weight at most: those of a vector. A matrix may have fewer."""
        return len(self.slots_of("vector", (1,)))


_SLOT = re.compile(r"[a-z][a-z0-9_]{0,30}")  # a slot is the name of a file of the checkpoint
OFFSET = "offset"  # the slot of an average: average − weights

# ----------------------------------------------------------------------------------------------------------------------
# Which tensors are what.

# Modules with a row for each token or position, by the last part of their path.
_TABLES = r"embed\w*|wte|wpe|(word|tok)_embeddings|lm_head"
TABLES = "tables"  # among the factors of learning rates
_OF_A_TABLE = re.compile(rf"(.*\.)?({_TABLES})\.(?!lora_).*")
_EXPERTS = re.compile(r"(.*\.)?experts\..*")


def is_of_a_table(name: str) -> bool:
    """Return whether a trained tensor is rows of an embedding or of the output head; not if it is an adapter of one."""
    return _OF_A_TABLE.fullmatch(name) is not None


def is_matrix(name: str, shape: TensorShape) -> bool:
    """Return whether a trained tensor is a matrix [out, in] that maps hidden states, or a stack of those of experts.

    The matrices of an adapter are. Not so: vectors, convolutions, and what `is_of_a_table`.
    """
    is_two = len(shape) == 2 or (len(shape) == 3 and _EXPERTS.fullmatch(name) is not None)
    return is_two and not is_of_a_table(name)


def _slots_of_muon(name: str, shape: TensorShape) -> dict[str, TensorShape]:
    return {"m": shape} if is_matrix(name, shape) else {"m": shape, "v": shape}


def _slots_of_adafactor(name: str, shape: TensorShape) -> dict[str, TensorShape]:
    return {"v": shape} if len(shape) < 2 else {"v_row": shape[:-1], "v_col": (*shape[:-2], shape[-1])}


# The defaults are those of torch.
ADAMW: Settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
SCHEDULE_FREE: Settings = {**ADAMW, "warmup_steps": 0.0}
LION: Settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
ADAFACTOR: Settings = {"decay_rate": 0.8, "eps": 1e-30, "clip_threshold": 1.0, "weight_decay": 0.0}
MUON: Settings = {**ADAMW, "momentum": 0.95, "iterations": 5}


class _Table(Mapping[RuleName, Optimizer]):
    """Our entries, and by name those of other packages, which are found when they are asked for, and not listed."""

    def __init__(self, own: Mapping[RuleName, Optimizer]) -> None:
        self._own = own
        self._installed: dict[RuleName, Optimizer] = {}

    def __getitem__(self, name: RuleName) -> Optimizer:
        """Return an entry. ConfigError if there is none of this name, or if that of a package cannot be used."""
        if name in self._own:
            return self._own[name]
        if name not in self._installed:
            self._installed[name] = installed_optimizer(name)
        return self._installed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or any(point.name == name for point in points_of(OPTIMIZERS_GROUP))

    def __iter__(self) -> Iterator[RuleName]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def installed_optimizer(name: RuleName) -> Optimizer:
    """Return the entry that a package has registered under this name: see docs/backends.md.

    Its formula uses what numpy, torch and mlx.core have in common, so every backend runs it. ConfigError if there is
    none, or if it cannot be used.
    """
    own = get_args(OptimizerName)
    found, origin = registered(
        OPTIMIZERS_GROUP, name, key="train.optimizer", others=own, page="docs/backends.md#optimizers"
    )
    if not isinstance(found, Optimizer):
        raise ConfigError(f"{origin} is a {type(found).__name__}, it must be a dualtune.model.optimizer.Optimizer")
    if wrong := [slot for slot in found.slots if not _SLOT.fullmatch(slot) or slot == OFFSET]:
        raise ConfigError(f"{origin} has the slot {wrong[0]!r}; allowed: small letters, digits and _, but not {OFFSET}")
    if "weight_decay" not in found.defaults:
        raise ConfigError(f"{origin} has no weight_decay among its defaults, which train.weight_decay sets")
    return found


def _eight_bit(exact: UpdateRule, slots: tuple[str, ...], defaults: Settings) -> Optimizer:
    return Optimizer(update_rules.coded(exact), slots, defaults, slot_bytes=EIGHT_BIT_BYTES, exact=exact)


OPTIMIZERS: Mapping[RuleName, Optimizer] = _Table(
    {
        "adamw": Optimizer(update_rules.adamw, ("m", "v"), ADAMW),
        "adamw_8bit": _eight_bit(update_rules.adamw_root, ("m", "root_v"), ADAMW),
        "sgd": Optimizer(update_rules.sgd, (), {"weight_decay": 0.0}),
        "lion": Optimizer(update_rules.lion, ("m",), LION),
        "lion_8bit": _eight_bit(update_rules.lion, ("m",), LION),
        "adafactor": Optimizer(
            update_rules.adafactor,
            ("v", "v_row", "v_col"),
            ADAFACTOR,
            by_tensor=lambda name, shape: True,
            shapes=_slots_of_adafactor,
        ),
        "muon": Optimizer(update_rules.muon, ("m", "v"), MUON, by_tensor=is_matrix, shapes=_slots_of_muon),
        "schedule_free": Optimizer(
            update_rules.schedule_free, ("d", "v"), SCHEDULE_FREE, result=update_rules.schedule_free_result
        ),
    }
)

IN_EIGHT_BITS: Mapping[RuleName, RuleName] = {"adamw": "adamw_8bit", "lion": "lion_8bit"}

# Slots that are means of squares, or their roots: never negative.
SECOND_MOMENTS = frozenset({"v", "root_v", "v_row", "v_col"})


class Run(NamedTuple):
    """Neighbours in a buffer of tensors that have the same learning rate."""

    lr_factor: float
    shapes: Shapes

    @property
    def sizes(self) -> list[int]:
        """The number of values of each tensor."""
        return [*map(math.prod, self.shapes.values())]


class Stack(NamedTuple):
    """Tensors of one shape with the same slots, which a formula updates together."""

    names: tuple[str, ...]
    slots: Mapping[str, TensorShape]  # of each of them
    is_whole: bool  # whether the formula needs them as they are


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What updates the weights: an entry of the table, its hyperparameters, and an average on top of it.

    A tensor's learning rate is that of the step times its factor, in every place where the formula has it, so also in
    the weight decay: as in PEFT's `create_loraplus_optimizer`.
    ConfigError for an unknown entry or hyperparameter.
    """

    name: RuleName = "adamw"
    changes: Settings = field(default_factory=dict[str, float])  # of hyperparameters: where they are not the defaults
    average: Averaging | None = None
    # Of the learning rate, by the end of a tensor's name, or TABLES for what `is_of_a_table`; else 1.
    lr_factors: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(f"optimizer: got '{self.name}', allowed: {', '.join(OPTIMIZERS)}")
        if unknown := self.changes.keys() - self.entry.defaults.keys():
            allowed = ", ".join(self.entry.defaults)
            raise ConfigError(f"optimizer {self.name}: got {', '.join(sorted(unknown))}, it has: {allowed}")

    @property
    def entry(self) -> Optimizer:
        return OPTIMIZERS[self.name]

    @property
    def settings(self) -> Settings:
        """All hyperparameters: defaults and changes."""
        return {**self.entry.defaults, **self.changes}

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of all slots: those of the entry, and the average's."""
        return slots_of(self.name, averages=self.average is not None)

    def slot_shapes(self, shapes: Shapes) -> dict[str, dict[str, TensorShape]]:
        """Return the shapes of the tensors of all slots, by slot and name. A slot may have no tensor."""
        return slot_shapes(self.entry, shapes, averages=self.average is not None)

    @property
    def trains_the_result(self) -> bool:
        """Whether the weights that are trained are those that the run evaluates and writes."""
        return self.entry.result is None and self.average is None

    def lr_factor(self, name: str) -> float:
        """Return the factor of the learning rate of the tensor with this name."""
        if TABLES in self.lr_factors and is_of_a_table(name):
            return self.lr_factors[TABLES]
        return next((factor for end, factor in self.lr_factors.items() if name.endswith(end)), 1.0)

    def runs(self, shapes: Shapes) -> list[Run]:
        """Return the runs of a buffer that holds tensors of these shapes, by name, in this order."""
        by_factor = groupby(shapes, self.lr_factor)
        return [Run(factor, {name: shapes[name] for name in names}) for factor, names in by_factor]

    def stacks(self, shapes: Shapes, most: int) -> list[Stack]:
        """Return what a formula that needs whole tensors updates together: at most `most` values, or one tensor."""
        entry, alike = self.entry, dict[tuple[TensorShape, tuple[str, ...]], list[str]]()
        assert entry.by_tensor is not None
        for name, shape in shapes.items():
            alike.setdefault((shape, tuple(entry.slots_of(name, shape))), []).append(name)
        stacks: list[Stack] = []
        for (shape, _), names in alike.items():
            each = max(1, most // max(1, math.prod(shape)))
            for start in range(0, len(names), each):
                part, first = tuple(names[start : start + each]), names[start]
                stacks.append(Stack(part, entry.slots_of(first, shape), entry.by_tensor(first, shape)))
        return stacks

    def update(
        self, w: np.ndarray, g: np.ndarray, slots: Slots, *, step: int, lr: float
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return (w, slots) of one tensor after update number `step`, counted from 1: see `UpdateRule`.

        `lr` is the learning rate of this tensor.
        """
        import numpy as np

        own = {slot: array[None] for slot, array in slots.items() if slot != OFFSET}
        new, after = self.entry.update(w[None], g[None], own, step=step, lr=lr, settings=self.settings, xp=np)
        new, after = new[0], {slot: array[0] for slot, array in after.items()}
        if self.average is not None:
            after[OFFSET] = self.average.update(slots[OFFSET], new - w, step)
        return new, after

    def result(self, w: np.ndarray, slots: Slots) -> np.ndarray:
        """Return the result's weights of one tensor, in the precision of the arguments."""
        rule = self.entry.result
        weights = w if rule is None else rule(w, slots, settings=self.settings)
        return weights if self.average is None else weights + slots[OFFSET]


def rule_of(optimizer: str, schedule: str) -> RuleName:
    """Return the entry of the table that a config's train.optimizer and train.schedule choose together."""
    return "schedule_free" if schedule == "schedule_free" else optimizer


def slots_of(rule: RuleName, *, averages: bool) -> tuple[str, ...]:
    """Return the slots of an entry, with an average or without: the files of its checkpoints."""
    return OPTIMIZERS[rule].slots + ((OFFSET,) if averages else ())


def slot_shapes(entry: Optimizer, shapes: Shapes, *, averages: bool) -> dict[str, dict[str, TensorShape]]:
    """Return the shapes of the tensors of all slots of what has these shapes, by slot and name."""
    slots: dict[str, dict[str, TensorShape]] = {slot: {} for slot in entry.slots}
    for name, shape in shapes.items():
        for slot, own in entry.slots_of(name, shape).items():
            slots[slot][name] = own
    return slots | ({OFFSET: dict(shapes)} if averages else {})


# ----------------------------------------------------------------------------------------------------------------------
# Averages of the weights of a run, on top of any optimizer.
#
# The average is kept as its offset from the weights, a slot that is zero before the first update: an engine adds one
# line to its update, and training itself is bitwise what it is without.


@dataclass(frozen=True, slots=True)
class Averaging:
    """An average of the weights after each update. Updates up to number `start` do not count.

    `least` is the smallest share of the newest weights. 0: all have the same share, the mean of the tail of a run
    (Polyak & Juditsky 1992; latest weight averaging, arXiv 2306.03241). 1 / n: an exponential moving average with the
    time constant n, which begins as a mean, so the first weights do not stay in it.
    """

    start: int = 0
    least: float = 0.0

    def share(self, step: int) -> float:
        """Return the share of the weights after update number `step`, counted from 1, in the new average."""
        return 1.0 if step <= self.start else max(self.least, 1 / (step - self.start))

    def update(self, offset: np.ndarray, change: np.ndarray, step: int) -> np.ndarray:
        """Return the offset after update number `step`, which has added `change` to the weights.

        average ← (1 − c)·average + c·w, both minus the new w: offset ← (1 − c)·(offset − change).
        """
        return (1 - self.share(step)) * (offset - change)


def averaging(kind: str, over: int, num_steps: int) -> Averaging | None:
    """Return the average that train.average = `kind` asks for, over `over` of `num_steps` updates; None for none."""
    match kind:
        case "none":
            return None
        case "tail":
            return Averaging(start=max(0, num_steps - over))
        case "ema":
            return Averaging(least=1 / over)
        case _:
            raise ValueError(f"train.average: got '{kind}', allowed: none, ema, tail")
