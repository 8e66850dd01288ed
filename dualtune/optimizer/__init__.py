"""Optimizers as data: for each, what the config, the checkpoint, the memory estimate and every backend know of it.

Each formula is here once, as a plain function of one tensor. A backend has a fast version of each, under the same name,
and the conformance suite compares it with the one here.

Legend: w weights, g their gradient after clipping, slots the state in w's shape; all arrays have one shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from dualtune.errors import ConfigError

if TYPE_CHECKING:  # the config imports this file, and starts without NumPy
    import numpy as np

OptimizerName = Literal["adamw", "adamw_8bit", "sgd"]
SLOT_BYTES = 4.0  # slots are float32 whatever the model computes in, unless the entry says otherwise

EIGHT_BIT_BYTES = 1 + 2 / 256  # a code for each value, and an int16 for each 256 values (`eight_bit.py`)

Settings = Mapping[str, float]
Slots = Mapping[str, "np.ndarray"]


class UpdateRule(Protocol):
    """Return (w, slots) after update number `step`, counted from 1, in the precision of the arguments."""

    def __call__(
        self, w: np.ndarray, g: np.ndarray, slots: Slots, *, step: int, lr: float, settings: Settings
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]: ...


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An entry of the table of optimizers."""

    update: UpdateRule
    slots: tuple[str, ...]  # its state: tensors with the names and shapes of the adapter, zero before the first update
    defaults: Settings  # its hyperparameters except the learning rate, which the schedule gives
    slot_bytes: float = SLOT_BYTES  # in memory, for each value of a slot. Checkpoints have float32

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

    from dualtune.optimizer.eight_bit import CODES, rounded

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


# The defaults are those of torch.
ADAMW: Settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
OPTIMIZERS: Mapping[OptimizerName, Optimizer] = MappingProxyType(
    {
        "adamw": Optimizer(adamw, ("m", "v"), ADAMW),
        "adamw_8bit": Optimizer(adamw_8bit, ("m", "root_v"), ADAMW, slot_bytes=EIGHT_BIT_BYTES),
        "sgd": Optimizer(sgd, (), {"weight_decay": 0.0}),
    }
)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer and its hyperparameters, where they differ from the defaults. ConfigError for an unknown one."""

    name: OptimizerName = "adamw"
    changes: Settings = field(default_factory=dict[str, float])

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
