"""Questions that replace the usual thresholds of a machine: is there enough memory, does this config fit?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dualtune.card import driver_of
from dualtune.errors import ConfigError
from dualtune.memory.counted import Shape
from dualtune.memory.estimate import Estimate
from dualtune.memory.plan import Smaller, plan_of
from dualtune.memory.shapes import decoder_of, published
from dualtune.platform.budget import Budget, budget, within
from dualtune.platform.machine import Machine
from dualtune.preflight.thresholds import device_of
from dualtune.text.show import in_bytes

if TYPE_CHECKING:
    from dualtune.config import Config


@dataclass(frozen=True, slots=True)
class Question:
    """The memory that a run needs, and what the machine has for it."""

    subject: str  # "a run of 12GB", "configs/rtx_16gb.yaml"
    need_bytes: int
    budget: Budget
    smaller: Smaller | None = None  # if it does not fit
    estimate: Estimate | None = None

    @property
    def fix(self) -> str | None:
        return str(self.smaller) if self.smaller else None

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.budget.bytes

    def __str__(self) -> str:
        need, have = in_bytes(self.need_bytes), in_bytes(self.budget.bytes)
        return f"{self.subject} needs {need}, has {have} ({self.budget.reason})"


def about_memory(machine: Machine, size: str) -> Question:
    """Ask whether an accelerator has a size such as "12GB" for a run. The memory of a CPU does not count.

    ConfigError for an invalid size.
    """
    from pydantic import ValidationError

    from dualtune.config import MemoryConfig

    try:
        need_bytes = MemoryConfig(limit=size).limit_bytes
    except ValidationError:
        need_bytes = None
    if need_bytes is None:
        raise ConfigError(f"--require-memory: got '{size}', must be a size such as 12GB, 1.5 TB or 512MiB")
    kind = device_of(machine)
    has = budget(machine, kind) if kind != "cpu" else Budget(0, "there is no GPU that it could use")
    return Question(f"a run of {size}", need_bytes, has)


def about_config(machine: Machine, path: Path) -> Question:
    """Ask whether the estimate of a config fits the best device of the machine.

    ConfigError for an invalid config, or one that the backend of that device does not honour; EnvironmentFault for a
    model of unknown shape.
    """
    from dualtune.config import load_config

    config = load_config(path)
    kind = device_of(machine)
    decoder = _decoder(config, driver_of(kind).name)
    has = within(budget(machine, kind), config.memory.limit_bytes)
    plan = plan_of(config, decoder, driver_of(kind).name, kind, has.bytes, has.host_bytes)
    return Question(str(path), plan.estimate.total_bytes, has, None if plan.fits else plan.smaller, plan.estimate)


def _decoder(config: Config, backend: str) -> Shape:
    """Return the shape of a published model, or of one on this machine."""
    if (known := published(config.model.name)) is not None:
        return decoder_of(known)
    from dualtune.preflight.config_model import decoder_to_plan  # late: it imports NumPy and tokenizers

    return decoder_to_plan(config, backend)
