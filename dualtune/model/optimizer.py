"""Optimizers as data: for each, what the config, the checkpoint, the memory estimate and every backend know of it.

Each formula is here once, as a plain function of one tensor. A backend has a fast version of each, under the same name,
and the conformance suite compares it with the one here.

The weights w that an optimizer trains need not be those that a run evaluates and writes. What the latter, its RESULT,
are is part of the entry, and `Averaging` adds an average to any entry (decision 0027).

Legend: w weights, g their gradient after clipping, slots the state in w's shape; all arrays have one shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from dualtune.base.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

OptimizerName = Literal["adamw", "adamw_8bit", "sgd"]  # as train.optimizer has them
RuleName = Literal[OptimizerName, "schedule_free"]  # as the table has them: train.schedule may choose another one
SLOT_BYTES = 4.0  # slots are float32 whatever the model computes in, unless the entry says otherwise

EIGHT_BIT_BYTES = 1 + 2 / 256  # a code for each value, and an int16 for each 256 values (`eight_bit.py`)

Settings = Mapping[str, float]
Slots = Mapping[str, "np.ndarray"]


class UpdateRule(Protocol):
    """Return (w, slots) after update number `step`, counted from 1, in the precision of the arguments."""

    def __call__(
        self, w: np.ndarray, g: np.ndarray, slots: Slots, *, step: int, lr: float, settings: Settings
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]: ...


class ResultRule(Protocol):
    """Return the weights that the run evaluates and writes, in the precision of the arguments."""

    def __call__(self, w: np.ndarray, slots: Slots, *, settings: Settings) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An entry of the table of optimizers."""

    update: UpdateRule
    slots: tuple[str, ...]  # its state: tensors with the names and shapes of the adapter, zero before the first update
    defaults: Settings  # its hyperparameters except the learning rate, which the schedule gives
    slot_bytes: float = SLOT_BYTES  # in memory, for each value of a slot. Checkpoints have float32
    result: ResultRule | None = None  # None: the result is w itself

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of optimizer state in memory per parameter."""
        return self.slot_bytes * len(self.slots)


def adamw(
    w: np.ndarray, g: np.ndarray, slots: Slots, *, step: int, lr: float, settings: Settings
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """AdamW with bias correction (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2):

    m ← β1·m + (1 − β1)·g, v ← β2·v + (1 − β2)·g²,
    w ← w·(1 − lr·decay) − lr·m̂ / (√v̂ + ε) with m̂ = m / (1 − β1^step), v̂ = v / (1 − β2^step).
    """
    from numpy import sqrt

    beta1, beta2 = settings["beta1"], settings["beta2"]
    m = beta1 * slots["m"] + (1 - beta1) * g
    v = beta2 * slots["v"] + (1 - beta2) * g**2
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    w = w * (1 - lr * settings["weight_decay"]) - lr * m_hat / (sqrt(v_hat) + settings["eps"])
    return w, {"m": m, "v": v}


def adamw_8bit(
    w: np.ndarray, g: np.ndarray, slots: Slots, *, step: int, lr: float, settings: Settings
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """`adamw` with both moments rounded to 8-bit codes after each update (`eight_bit.py`).

    It keeps √v: the codes then have half the exponents to cover, and a value is the step's own denominator.
    """
    from numpy import sqrt

    from dualtune.model.eight_bit import CODES, rounded

    w, new = adamw(w, g, {"m": slots["m"], "v": slots["root_v"] ** 2}, step=step, lr=lr, settings=settings)
    exact = {"m": new["m"], "root_v": sqrt(new["v"])}
    return w, {slot: rounded(values, CODES[slot], step) for slot, values in exact.items()}


def sgd(
    w: np.ndarray, g: np.ndarray, slots: Slots, *, step: int, lr: float, settings: Settings
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Plain gradient descent, without momentum and so without state: w ← w·(1 − lr·decay) − lr·g.

    Goodfellow et al., Deep Learning, algorithm 8.1. For SGD, decoupled decay equals the L2 penalty of
    `torch.optim.SGD` (arXiv 1711.05101, proposition 1).
    """
    return w * (1 - lr * settings["weight_decay"]) - lr * g, {}


def schedule_free(
    w: np.ndarray, g: np.ndarray, slots: Slots, *, step: int, lr: float, settings: Settings
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Schedule-free AdamW (Defazio et al., arXiv 2405.15682, algorithm 1), by the offset d of its base sequence.

    The paper has three sequences: z, which gradients move; their average x; and y = (1 − β1)·z + β1·x, where the
    gradient is taken. Here w is y and the slot d is z − y, zero at the start, so x = w − ((1 − β1) / β1)·d is the
    result. With u = g / (√v̂ + ε) + decay·w, and c the share of the newest z in the average, the paper's

        z ← z − lr·u,  x ← (1 − c)·x + c·z,  y ← (1 − β1)·z + β1·x

    is, after x and z are replaced by w and d,

        w ← w + c·d − (1 − β1·(1 − c))·lr·u,  d ← (1 − c)·(d − β1·lr·u).
    """
    from numpy import sqrt

    beta1, beta2, c = settings["beta1"], settings["beta2"], newest_share(step, settings["warmup_steps"])
    v = beta2 * slots["v"] + (1 - beta2) * g**2
    u = lr * (g / (sqrt(v / (1 - beta2**step)) + settings["eps"]) + settings["weight_decay"] * w)
    return w + c * slots["d"] - (1 - beta1 * (1 - c)) * u, {"d": (1 - c) * (slots["d"] - beta1 * u), "v": v}


def newest_share(step: float, warmup_steps: float) -> float:
    """Return c, the weight of the newest z in x: its squared relative rate, divided by the sum of all of them so far.

    Update i has the relative rate min(1, i / (warmup_steps + 1)), as in `train/objective.py`; squares are the paper's.
    The sum in closed form makes c a function of the number of updates, so there is nothing to save.
    """
    end, m = warmup_steps + 1, min(step, warmup_steps)
    rising = m * (m + 1) * (2 * m + 1) / 6 / end**2
    return min(1.0, step / end) ** 2 / (rising + max(0.0, step - warmup_steps))


def schedule_free_result(w: np.ndarray, slots: Slots, *, settings: Settings) -> np.ndarray:
    """The average x of `schedule_free`."""
    beta1 = settings["beta1"]
    return w - w.dtype.type((1 - beta1) / beta1) * slots["d"]


# The defaults are those of torch.
ADAMW: Settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
SCHEDULE_FREE: Settings = {**ADAMW, "warmup_steps": 0.0}
OPTIMIZERS: Mapping[RuleName, Optimizer] = MappingProxyType(
    {
        "adamw": Optimizer(adamw, ("m", "v"), ADAMW),
        "adamw_8bit": Optimizer(adamw_8bit, ("m", "root_v"), ADAMW, slot_bytes=EIGHT_BIT_BYTES),
        "sgd": Optimizer(sgd, (), {"weight_decay": 0.0}),
        "schedule_free": Optimizer(schedule_free, ("d", "v"), SCHEDULE_FREE, result=schedule_free_result),
    }
)

SECOND_MOMENTS = frozenset({"v", "root_v"})  # slots that are means of squares, or their roots: never negative


class Run(NamedTuple):
    """Neighbours in a buffer of tensors that have the same learning rate."""

    lr_factor: float
    sizes: tuple[int, ...]  # values of each tensor


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
    lr_factors: Mapping[str, float] = field(default_factory=dict[str, float])  # by the end of a tensor's name; else 1

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

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of optimizer state in memory per parameter."""
        return self.entry.bytes_per_parameter + (0 if self.average is None else SLOT_BYTES)

    @property
    def trains_the_result(self) -> bool:
        """Whether the weights that are trained are those that the run evaluates and writes."""
        return self.entry.result is None and self.average is None

    def lr_factor(self, name: str) -> float:
        """Return the factor of the learning rate of the tensor with this name."""
        return next((factor for end, factor in self.lr_factors.items() if name.endswith(end)), 1.0)

    def runs(self, sizes: Mapping[str, int]) -> list[Run]:
        """Return the runs of a buffer that holds tensors of these sizes, by name, in this order."""
        by_factor = groupby(sizes.items(), lambda item: self.lr_factor(item[0]))
        return [Run(factor, tuple(size for _, size in items)) for factor, items in by_factor]

    def update(
        self, w: np.ndarray, g: np.ndarray, slots: Slots, *, step: int, lr: float
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return (w, slots) of one tensor after update number `step`, counted from 1: see `UpdateRule`.

        `lr` is the learning rate of this tensor.
        """
        new, after = self.entry.update(w, g, slots, step=step, lr=lr, settings=self.settings)
        if self.average is not None:
            after[OFFSET] = self.average.update(slots[OFFSET], new - w, step)
        return new, after

    def result(self, w: np.ndarray, slots: Slots) -> np.ndarray:
        """Return the result's weights of one tensor, in the precision of the arguments."""
        rule = self.entry.result
        weights = w if rule is None else rule(w, slots, settings=self.settings)
        return weights if self.average is None else weights + slots[OFFSET]


def rule_of(optimizer: OptimizerName, schedule: str) -> RuleName:
    """Return the entry of the table that a config's train.optimizer and train.schedule choose together."""
    return "schedule_free" if schedule == "schedule_free" else optimizer


def slots_of(rule: RuleName, *, averages: bool) -> tuple[str, ...]:
    """Return the slots of an entry, with an average or without: the files of its checkpoints."""
    return OPTIMIZERS[rule].slots + ((OFFSET,) if averages else ())


# ----------------------------------------------------------------------------------------------------------------------
# Averages of the weights of a run, on top of any optimizer.
#
# The average is kept as its offset from the weights, a slot that is zero before the first update: an engine adds one
# line to its update, and training itself is bitwise what it is without.

OFFSET = "offset"  # the slot: average − weights


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
