"""Whether a config fits into the memory of a machine, and what to change if not."""

from __future__ import annotations

from dataclasses import dataclass

from dualtune.card import card_of
from dualtune.checks import Check
from dualtune.config import Config
from dualtune.errors import ConfigError, EnvironmentFault
from dualtune.memory.estimate import Estimate
from dualtune.memory.plan import MemoryPlan, plan_of
from dualtune.platform.budget import Budget, budget, within
from dualtune.platform.choose import PlatformChoice
from dualtune.platform.machine import Machine
from dualtune.preflight.config_model import decoder_to_plan
from dualtune.text.show import in_bytes
from dualtune.train.prepare import start_of, with_adapter_of


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a run needs, and the memory that it may use."""

    plan: MemoryPlan
    budget: Budget

    @property
    def estimate(self) -> Estimate:
        return self.plan.estimate


def memory_row(memory: MemoryNeed) -> Check:
    plan, budget = memory.plan, memory.budget
    if not budget.bytes:  # no such device: another row reports it
        return Check("memory", "skipped", f"needs {in_bytes(plan.estimate.total_bytes)}; {budget.reason}")
    found = plan.compare(budget.reason)
    return Check("memory", "ok", found) if plan.fits else Check("memory", "fail", found, str(plan.smaller))


def plan_config(
    config: Config, machine: Machine, choice: PlatformChoice, evaluated: Config | None = None
) -> MemoryNeed:
    """Plan the run of a config on a machine; `evaluated` is as for `plan_of`.

    ConfigError for an invalid combination, EnvironmentFault where there is no formula or no such device.
    """
    if config.adapter.init_from is not None:
        start = start_of(config)
        config, evaluated = with_adapter_of(config, start), evaluated and with_adapter_of(evaluated, start)
    card = card_of(choice.backend)
    kind = card.kind_for(choice.platform, machine.kinds)
    if card.memory is None or kind is None:
        raise EnvironmentFault(f"there is no memory estimate for the backend {choice.backend}")
    decoder = decoder_to_plan(config, choice.backend)
    if config.memory.sharding == "full":
        raise ConfigError("memory.sharding: got full: the memory of a split base is not planned yet. Set it to auto")
    has = within(budget(machine, choice.platform if kind == "cuda" else kind), config.memory.limit_bytes)
    if not has.bytes:
        raise EnvironmentFault(f"{has.reason}. Plan for another machine with --machine, such as h100-80")
    return MemoryNeed(plan_of(config, decoder, choice.backend, kind, has.bytes, has.host_bytes, evaluated), has)
