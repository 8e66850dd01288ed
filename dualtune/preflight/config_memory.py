"""Whether a config fits into the memory of a machine, and what to change if not."""

from __future__ import annotations

from dataclasses import dataclass

from dualtune.checks import Check
from dualtune.memory.estimate import Estimate
from dualtune.memory.plan import MemoryPlan
from dualtune.platform.budget import Budget
from dualtune.text.show import in_bytes


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
